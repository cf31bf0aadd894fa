"""The end of a user's program with several ranks after an exception that nobody caught.

Python would print a traceback on each rank, and then finalize the process. A thread that waits for
a message of a rank that has ended aborts a process that is being finalized (SIGABRT).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import TracebackType

from dynmo.elastic.launcher.environment import end_process
from dynmo.errors import DynmoError, place
from dynmo.runtime.comm.world import World


def report_uncaught(world: World) -> None:
    """Has this process end in one line after Ctrl-C or an error of dynmo.

    Other errors keep their traceback, and with DYNMO_TRACEBACK=1 all do. The process ends without
    finalization, as `dynmo train` does. In an interactive shell it goes on.
    """
    before, name = sys.excepthook, f"[rank{world.rank}]"
    if world.size == 1:
        return

    def report(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        status, line = 1, None
        if isinstance(error, KeyboardInterrupt):
            status, line = 130, "interrupted"
        elif isinstance(error, DynmoError):
            status, line = error.exit_status, f"{type(error).__name__}: {error}"
        if line is None or os.environ.get("DYNMO_TRACEBACK") == "1":
            before(kind, error, traceback)
        else:
            text = " ".join(f"{line}{place(error)}".split())
            print(f"{name}: {text}\n", end="", file=sys.stderr, flush=True)  # in one piece
        if not hasattr(sys, "ps1") and not sys.flags.interactive:
            _end(status)

    sys.excepthook = report


def _end(status: int) -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # torchrun sends it once more
    _end_threads()
    end_process(status)


def _end_threads() -> None:
    """Waits for threads as Python does at its end: idle workers of an executor are told to end."""
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
