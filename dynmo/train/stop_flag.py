"""Signals that ask a run to stop after its current step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stop_flag() -> Iterator[Callable[[], bool]]:
    """Yields a function that returns True once SIGTERM or SIGINT has asked for a stop.

    The run stops after the current step. The ranks agree on it at the end of that step, or one step
    later with post-validation. A second SIGINT interrupts at once. Ranks of dynmo's own launcher
    ignore SIGINT, because the launcher turns it into SIGTERM.
    """
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)

    if threading.current_thread() is not threading.main_thread():
        # Only the main thread gets signals.
        yield lambda: False
        return
    numbers = [
        n for n in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(n) is not signal.SIG_IGN
    ]
    before = {number: signal.signal(number, ask) for number in numbers}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
