"""The end of a process whose threads may still work."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from typing import NoReturn


def end_process(status: int) -> NoReturn:
    """Ends a process without the finalization of Python and torch.

    A thread of a process group may still be ending. Finalization would then abort the process,
    although its work is done. It would also wait for threads that plan. Exit functions have run and
    output is flushed.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # as on a closed pipe
            stream.flush()
    os._exit(status)
