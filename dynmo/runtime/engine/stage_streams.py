"""Where the stages of one process compute: all on the current stream, or each in its lane, a stream
that runs beside the others'.

    current stream   .. optimizer |fork                              |join  norms, optimizer ..
    lane 0 (stage 0)              | F0 F1 .. B0 W0 B1 W1             |
    lane 1 (stage 1)              | .. F0 B0 F1 B1 W0 W1             |
                                       waits for the event behind stage 0's F0

One thread gives every lane its work, in the order of the program; only the lanes wait for each
other, the thread for nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from dynmo.runtime.layer.split_backward import Tensors
from dynmo.schedule.lowering import Direction

Key = tuple[Direction, int, int]
"""What one stage hands to another in memory: direction, the stage that needs it, microbatch."""


class StageStreams(Protocol):
    """`fork` before a program and `join` behind it, on the same stream. Within `of(stage)`: `need`
    before an op takes something, `made` after an op has made it."""

    def fork(self) -> None: ...
    def join(self) -> None: ...
    def of(self, stage: int) -> AbstractContextManager[object]: ...
    def need(self, key: Key, tensors: Tensors) -> None: ...
    def produced(self, key: Key) -> None: ...


class DefaultStream:
    """All stages compute on the current stream, one after another."""

    _here = nullcontext()

    def fork(self) -> None:
        pass

    def join(self) -> None:
        pass

    def of(self, stage: int) -> AbstractContextManager[object]:
        return self._here

    def need(self, key: Key, tensors: Tensors) -> None:
        pass

    def produced(self, key: Key) -> None:
        pass


class SliceStreams:
    """streams: of each lane; placement: per stage, its lane."""

    def __init__(self, streams: Sequence[torch.cuda.Stream], placement: Sequence[int]) -> None:
        self._streams, self._placement = streams, placement
        self._events: dict[Key, torch.cuda.Event] = {}

    def fork(self) -> None:
        self._events.clear()
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(stream.device))

    def join(self) -> None:
        for stream in self._streams:
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    def of(self, stage: int) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._streams[self._placement[stage]])

    def need(self, key: Key, tensors: Tensors) -> None:
        event = self._events.pop(key, None)
        if event is None:
            return
        stream = torch.cuda.current_stream()
        stream.wait_event(event)
        for tensor in tensors:
            # Its memory is the other lane's, which would take it back as soon as this thread lets
            # go of it.
            tensor.record_stream(stream)

    def produced(self, key: Key) -> None:
        event = self._events[key] = torch.cuda.Event()
        event.record()
