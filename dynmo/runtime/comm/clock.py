"""Marks in time on the device that does the work.

The host clock serves on CPU. CUDA events serve on a GPU, read once a step, when its loss is known.

On a busy machine another process may take the core away in the middle of an op. The host clock
knows that from the thread's own account:

    elapsed     |#####---------#####|     # the thread runs    - another process has its core
    seconds     |#####         #####|     its CPU time: it lost the core and never waited by itself

An op may wait by itself (an emulated layer sleeps, a kernel waits for its helper threads). It takes
all the time that elapses. If such an op also loses its core, nobody can tell how long each took.
"""

from __future__ import annotations

import sys
import time
from typing import Any, Protocol

import torch

if sys.platform == "linux":
    from resource import RUSAGE_THREAD, getrusage


class Clock(Protocol):
    """Notes times in the order of the device's work. They are read after `settle()`."""

    def mark(self) -> Any: ...

    def seconds(self, start: Any, end: Any) -> float | None:
        """Returns the seconds of work between two marks, or None if nobody can tell."""
        ...

    def elapsed(self, start: Any, end: Any) -> float: ...

    def settle(self) -> None: ...


class Mark(float):
    """A moment of time.perf_counter.

    Attributes:
        cpu: CPU seconds of the thread.
        preempted: Context switches that others forced on the thread.
        waited: Context switches that it asked for.
    """

    __slots__ = ("cpu", "preempted", "waited")

    cpu: float
    preempted: int
    waited: int


class HostClock:
    """time.perf_counter, without time in which the thread had lost its core.

    Only Linux counts a thread's context switches. Elsewhere all time that elapses counts as work.
    """

    @staticmethod
    def mark() -> Mark:
        mark = Mark(time.perf_counter())
        mark.cpu = time.thread_time()
        mark.preempted = mark.waited = 0
        if sys.platform == "linux":
            usage = getrusage(RUSAGE_THREAD)
            mark.preempted, mark.waited = usage.ru_nivcsw, usage.ru_nvcsw
        return mark

    @staticmethod
    def seconds(start: Mark, end: Mark) -> float | None:
        """CPU time if the thread lost its core and never waited. None if it did both."""
        if end.preempted == start.preempted:
            return end - start
        return end.cpu - start.cpu if end.waited == start.waited else None

    @staticmethod
    def elapsed(start: float, end: float) -> float:
        return end - start

    def settle(self) -> None:
        pass


class CudaClock:
    """CUDA events on the current stream. They are read after the step's end."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end) / 1000

    elapsed = seconds

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)


def clock_for(device: torch.device) -> Clock:
    return CudaClock(device) if device.type == "cuda" else HostClock()
