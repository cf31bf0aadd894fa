"""Marks in time on the device that does the work: host clock on CPU, CUDA events on a GPU (read once a step, when its loss is known)."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """`mark()` notes now, in the order of the device's work; `seconds` is asked after `settle()`."""

    def mark(self) -> Any: ...
    def seconds(self, start: Any, end: Any) -> float: ...
    def settle(self) -> None: ...


class HostClock:
    """time.perf_counter."""

    mark = staticmethod(time.perf_counter)

    @staticmethod
    def seconds(start: float, end: float) -> float:
        return end - start

    def settle(self) -> None:
        pass


class CudaClock:
    """CUDA events on the current stream; read after the step's end."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end) / 1000

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)


def clock_for(device: torch.device) -> Clock:
    return CudaClock(device) if device.type == "cuda" else HostClock()
