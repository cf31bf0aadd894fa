"""Signals that ask a run to save, or to stop after its current step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from dynmo.errors import Interrupted

Handler = Callable[[int, FrameType | None], None]

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAVE_SIGNAL = signal.SIGUSR1


@dataclass
class Asked:
    """What signals have asked this process for.

    Attributes:
        stops: Number of SIGINT and SIGTERM.
        saves: Number of SIGUSR1.
    """

    stops: int = 0
    saves: int = 0


_asked: Asked | None = None
_open = 0  # times that `signals_heard` is open
_before: dict[int, Any] = {}  # handlers


def is_asked_to_stop() -> bool:
    """Returns whether a signal has asked this process to stop its training."""
    return _asked is not None and _asked.stops > 0


@contextmanager
def signals_heard(*, interrupts: bool = True) -> Iterator[Asked]:
    """Yields what signals ask for while it is open.

    A training stops after its current step. The ranks agree on it at the end of that step, or one
    step later with post-validation. Ranks of dynmo's own launcher ignore SIGINT, because the
    launcher turns it into SIGTERM.

    Those that are open at one time yield the same object, and the last that is closed gives the
    signals back. Only the main thread gets signals.

    Args:
        interrupts: Whether a second SIGINT raises KeyboardInterrupt at once.
    """
    global _asked, _open
    if threading.current_thread() is not threading.main_thread():
        yield _asked or Asked()
        return
    if _asked is None:
        _asked = Asked()
        _before.update(_taken_by(_taker(_asked, interrupts), (*STOP_SIGNALS, SAVE_SIGNAL)))
    _open += 1
    try:
        yield _asked
    finally:
        _open -= 1
        if not _open:
            _asked = None
            _give_back(_before)
            _before.clear()


def _taker(asked: Asked, interrupts: bool) -> Handler:
    def take(number: int, frame: FrameType | None) -> None:
        del frame
        if number == SAVE_SIGNAL:
            asked.saves += 1
            return
        asked.stops += 1
        if interrupts and number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)

    return take


def _taken_by(handler: Handler, numbers: Iterable[int]) -> dict[int, Any]:
    """Sets a handler of signals that are not ignored. Returns those of before."""
    heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in heard}


def _give_back(before: Mapping[int, Any]) -> None:
    for number, handler in before.items():
        signal.signal(number, handler)


@contextmanager
def signals_held_back() -> Iterator[None]:
    """Keeps SIGINT and SIGTERM until its end, whichever thread they reach.

    Processes that are started in it hold them back, too.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came = list[int]()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    # Another thread may get the signal, but the handler runs in this one.
    before = _taken_by(lambda number, _: came.append(number), STOP_SIGNALS)
    try:
        yield
    finally:
        _give_back(before)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for number in came[:1]:
            signal.raise_signal(number)


@contextmanager
def interrupted_by_signals(message: str) -> Iterator[None]:
    """Raises an error at the first SIGINT or SIGTERM, so that files and processes are cleared away.

    Raises:
        Interrupted: A signal came. The error has the message.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        del frame
        signal.signal(number, signal.SIG_IGN)
        raise Interrupted(message)

    before = _taken_by(interrupt, STOP_SIGNALS)
    try:
        yield
    finally:
        _give_back(before)
