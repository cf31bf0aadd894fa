"""Signals that ask a run to stop after its current step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stop_flag() -> Iterator[Callable[[], bool]]:
    """SIGTERM and SIGINT ask for a stop after the current step; the ranks agree on it at that
    step's end (with post-validation, one later).

    A second SIGINT interrupts at once. Ranks of dynmo's own launcher ignore SIGINT: it turns it
    into SIGTERM.
    """
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)

    if (
        threading.current_thread() is not threading.main_thread()
    ):  # it gets no signals, so nobody asks
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
