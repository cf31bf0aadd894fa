"""Host time without the time of other processes, from made-up thread accounts."""

from __future__ import annotations

import resource
import sys
import time
from types import SimpleNamespace

import pytest

from dynmo.runtime.comm import clock
from dynmo.runtime.comm.clock import HostClock, Mark


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts a thread's context switches")
@pytest.mark.parametrize(
    ("preempted", "waited", "seconds"),
    [
        (0, 0, 10.0),  # on its core all the time
        (0, 3, 10.0),  # slept
        (2, 0, 1.5),  # lost its core
        (2, 3, None),  # both: which of them took how long, nobody knows
    ],
)
def test_host_clock_excludes_time_of_other_processes(
    monkeypatch: pytest.MonkeyPatch, preempted: int, waited: int, seconds: float | None
) -> None:
    def at(wall: float, cpu: float, involuntary: int, voluntary: int) -> Mark:
        usage = SimpleNamespace(ru_nivcsw=involuntary, ru_nvcsw=voluntary)
        monkeypatch.setattr(time, "perf_counter", lambda: wall)
        monkeypatch.setattr(time, "thread_time", lambda: cpu)
        for where in (resource, clock):
            monkeypatch.setattr(where, "getrusage", lambda who: usage, raising=False)
        return HostClock.mark()

    start, end = at(100.0, 1.0, 5, 7), at(110.0, 2.5, 5 + preempted, 7 + waited)
    monkeypatch.undo()
    host = HostClock()
    assert host.seconds(start, end) == seconds
    assert host.elapsed(start, end) == 10.0


def test_mark_lies_between_two_clock_reads() -> None:
    before, mark, after = time.perf_counter(), HostClock.mark(), time.perf_counter()
    assert before <= mark <= after
