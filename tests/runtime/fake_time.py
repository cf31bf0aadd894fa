"""Time that passes only if somebody sleeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from unittest import mock

from dynmo.models import emulated
from dynmo.runtime.comm import clock, device_waits, outbox, rank_group


class FakeTime:
    """Stands for the module `time`. Calls that were given to `at` run when a sleep reaches them."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, Callable[[], object]]] = []

    def perf_counter(self) -> float:
        return self.now

    thread_time = perf_counter

    def sleep(self, seconds: float) -> None:
        self.until(self.now + seconds)

    def until(self, deadline: float) -> None:
        self.now = max(self.now, deadline)
        for moment, call in list(self._due):
            if moment <= self.now:
                self._due.remove((moment, call))
                call()

    def at(self, moment: float, call: Callable[[], object]) -> None:
        self._due.append((moment, call))


@contextmanager
def _instead(modules: Sequence[object]) -> Iterator[FakeTime]:
    time = FakeTime()
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(mock.patch.object(module, "time", time))
        yield time


@contextmanager
def emulated_time() -> Iterator[FakeTime]:
    """Emulated layers take their seconds exactly, and none of the real time."""

    def mark() -> clock.Mark:
        now = clock.Mark(time.now)
        now.cpu, now.preempted, now.waited = time.now, 0, 0
        return now

    with (
        _instead([emulated, clock]) as time,
        mock.patch.object(emulated, "sleep_until", time.until),
        mock.patch.object(clock.HostClock, "mark", staticmethod(mark)),
    ):
        yield time


@contextmanager
def device_time() -> Iterator[FakeTime]:
    """Waits for a device take no real time."""
    with _instead([device_waits, outbox, rank_group]) as time:
        yield time
