"""Reports once that loops are compiled, so that a first run seems not to hang."""

# numba has no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def compilation_told() -> Iterator[None]:
    """Reports the first loop that numba compiles on stderr, while it is open.

    Loops that numba loads from its cache are not reported.
    """
    from numba.core import event

    class Notice(event.Listener):
        def __init__(self) -> None:
            self.is_told = False

        def on_start(self, event: object) -> None:
            if not self.is_told:
                self.is_told = True
                print("compiling dynmo's loops (once, about 20 s) ...", file=sys.stderr, flush=True)

        def on_end(self, event: object) -> None:
            pass

    with event.install_listener("numba:compile", Notice()):
        yield
