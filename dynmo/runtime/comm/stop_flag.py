"""Signals that ask a training to save, or to stop after its current step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopFlag:
    """What signals have asked for so far. Calling it returns whether to stop."""

    def __init__(self) -> None:
        self.stop = self.save = False

    def __call__(self) -> bool:
        return self.stop

    def take_save(self) -> bool:
        """Returns whether to save, which was then asked for."""
        save, self.save = self.save, False
        return save

    def ask(self, number: int, frame: FrameType | None) -> None:
        del frame
        if number == signal.SIGUSR1:
            self.save = True
            return
        self.stop = True
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)


_flag: StopFlag | None = None


def is_asked_to_stop() -> bool:
    """Returns whether a signal has asked this process to stop its training."""
    return _flag is not None and _flag.stop


@contextmanager
def stop_flag() -> Iterator[StopFlag]:
    """Yields a flag that signals set: SIGTERM and SIGINT ask for a stop, SIGUSR1 to save.

    A training stops after its current step. The ranks agree on it at the end of that step, or one
    step later with post-validation. A second SIGINT interrupts at once. Ranks of dynmo's own
    launcher ignore SIGINT, because the launcher turns it into SIGTERM.

    A flag within another one is the same.
    """
    global _flag
    if _flag is not None:
        yield _flag
        return
    if threading.current_thread() is not threading.main_thread():
        # Only the main thread gets signals.
        yield StopFlag()
        return
    _flag = StopFlag()
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = {
        number: signal.signal(number, _flag.ask)
        for number in numbers
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield _flag
    finally:
        _flag = None
        for number, handler in before.items():
            signal.signal(number, handler)
