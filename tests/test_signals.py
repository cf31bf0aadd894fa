"""What signals ask a process for."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from dynmo.errors import Interrupted
from dynmo.signals import (
    SAVE_SIGNAL,
    interrupted_by_signals,
    is_asked_to_stop,
    signals_heard,
    signals_held_back,
)

NUMBERS = (signal.SIGINT, signal.SIGTERM, SAVE_SIGNAL)


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in NUMBERS]


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def test_signals_are_counted_and_then_as_before() -> None:
    before = handlers()
    with signals_heard() as asked:
        for number in (SAVE_SIGNAL, SAVE_SIGNAL, signal.SIGTERM):
            send(number)
        assert (asked.saves, asked.stops, is_asked_to_stop()) == (2, 1, True)
    assert (handlers(), is_asked_to_stop()) == (before, False)


def test_first_that_is_closed_leaves_signals_to_the_second() -> None:
    before, first, second = handlers(), signals_heard(), signals_heard()
    asked = first.__enter__()
    assert second.__enter__() is asked
    first.__exit__(None, None, None)
    send(signal.SIGTERM)
    assert asked.stops == 1
    second.__exit__(None, None, None)
    assert handlers() == before


def test_second_interrupt_interrupts_a_training() -> None:
    with signals_heard() as asked:
        send(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
        assert asked.stops == 1


def test_launcher_counts_interrupts() -> None:
    with signals_heard(interrupts=False) as asked:
        send(signal.SIGINT)
        send(signal.SIGINT)
        assert asked.stops == 2


def test_ignored_signal_stays_ignored() -> None:
    before = signal.signal(SAVE_SIGNAL, signal.SIG_IGN)
    try:
        with signals_heard() as asked:
            send(SAVE_SIGNAL)
            assert not asked.saves
        assert signal.getsignal(SAVE_SIGNAL) is signal.SIG_IGN
    finally:
        signal.signal(SAVE_SIGNAL, before)


def test_other_threads_hear_nothing() -> None:
    before, seen = handlers(), list[list[object]]()

    def hear() -> None:
        with signals_heard(), interrupted_by_signals("never"):
            seen.append(handlers())

    thread = threading.Thread(target=hear)
    thread.start()
    thread.join()
    assert seen == [before]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_work_is_interrupted_once(number: int) -> None:
    before = handlers()

    def work() -> None:
        with interrupted_by_signals("nothing was written"):
            try:
                send(number)
            finally:
                send(number)  # while files are cleared away

    with pytest.raises(Interrupted, match="nothing was written"):
        work()
    assert handlers() == before


def test_signal_that_reaches_another_thread_is_held_back() -> None:
    before, done = handlers(), list[str]()

    def work() -> None:
        with interrupted_by_signals("nothing was written"), signals_held_back():
            thread = threading.Thread(target=send_from_here)
            thread.start()
            thread.join()
            done.append("start")

    def send_from_here() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, NUMBERS)
        send(signal.SIGTERM)

    with pytest.raises(Interrupted, match="nothing was written"):
        work()
    assert (done, handlers()) == (["start"], before)
