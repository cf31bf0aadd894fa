"""Streams on which the stages of one process compute.

All stages compute on the current stream, or each on the stream of its slice of the GPU.

    current stream   .. optimizer |fork                              |join  norms, optimizer ..
    slice 0 (stage 0)             | F0 F1 .. B0 W0 B1 W1             |
    slice 1 (stage 1)             | .. F0 B0 F1 B1 W0 W1             |
                                       waits for the event behind stage 0's F0

One thread gives every slice its work, in the order of the program. Only the slices wait for each
other. The thread waits for nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from dynmo.runtime.layer.span import Tensors
from dynmo.schedule.lowering import Direction

Key = tuple[Direction, int, int]
"""Name of a result that one stage hands to another: direction, receiving stage, microbatch."""


class StageStreams:
    """Streams of the stages of one process: here the current stream, for all in turn.

    `fork` comes before a program and `join` behind it, on the same stream. Within `of(stage)`,
    `need` comes before an op takes a result, and `produced` after an op has made one.
    """

    _here = nullcontext()

    def fork(self) -> None: ...
    def join(self) -> None: ...
    def of(self, stage: int) -> AbstractContextManager[object]:
        return self._here

    def need(self, key: Key, tensors: Tensors) -> None: ...
    def produced(self, key: Key) -> None: ...


class SliceStreams(StageStreams):
    """Each stage computes on the stream of its slice."""

    def __init__(self, streams: Sequence[torch.cuda.Stream], stage_ranks: Sequence[int]) -> None:
        self._streams, self._stage_ranks = streams, stage_ranks
        self._events: dict[Key, torch.cuda.Event] = {}

    def fork(self) -> None:
        self._events.clear()
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(stream.device))

    def join(self) -> None:
        for stream in self._streams:
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    def of(self, stage: int) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._streams[self._stage_ranks[stage]])

    def need(self, key: Key, tensors: Tensors) -> None:
        """Lets the current slice wait until another has made a result."""
        event = self._events.pop(key, None)
        if event is None:
            return
        stream = torch.cuda.current_stream()
        stream.wait_event(event)
        for tensor in tensors:
            # The memory belongs to the other slice, which would reuse it as soon as this thread
            # drops it.
            tensor.record_stream(stream)

    def produced(self, key: Key) -> None:
        event = self._events[key] = torch.cuda.Event()
        event.record()
