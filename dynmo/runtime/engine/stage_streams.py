"""Streams on which the stages of one process compute.

All stages compute on the current stream, or each on the stream of its slice of the GPU.

    current stream   .. optimizer |fork                              |join  norms, optimizer ..
    slice 0 (stage 0)             | F0 F1 .. B0 W0 B1 W1             |
    slice 1 (stage 1)             | .. F0 B0 F1 B1 W0 W1             |
                                       waits for the event behind stage 0's F0

One thread gives every slice its work, in the order of the program. Only the slices wait for each
other. The thread waits for nobody.

A slice is a group of SMs of its own, with a stream on it. Memory, its bandwidth and the L2 cache
are shared. The code follows the documentation of cuda-core 1.2 and of CUDA's green contexts.
`make gpu` has run it on an H100.

    132 SMs, 4 slices:   | 32 | 32 | 32 | 32 | 4 left over, in no slice
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch

from dynmo.errors import ConfigError, not_installed
from dynmo.runtime.layer.joint_graph import Tensors
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


class SmSlice(NamedTuple):
    """A group of `sms` SMs and its stream. `owner` must live as long as the stream."""

    sms: int
    stream: torch.cuda.Stream
    owner: Any


def make_streams(
    device: torch.device, slices: int | None, stage_ranks: Sequence[int]
) -> StageStreams:
    """Makes a stream on each slice of a CUDA device. CPU stages compute in turn."""
    if slices is None or device.type != "cuda":
        return StageStreams()
    return SliceStreams([each.stream for each in cut(device.index or 0, slices)], stage_ranks)


def sizes(sms: int, slices: int, least: int, step: int) -> range:
    """Returns the slice sizes to try: multiples of `step`, largest first."""
    step = max(1, step)
    return range(sms // slices // step * step, max(1, least) - 1, -step)


# The split is made once a process. The groups of two splits overlap, and torch keeps memory for a
# stream that must not end before it.
@cache
def cut(device: int, slices: int) -> tuple[SmSlice, ...]:
    """Cuts a GPU into equal slices, all from one split.

    torch.cuda.green_contexts splits anew for each context, and its groups overlap.

    Raises:
        ConfigError: cuda-core is missing, or the driver cannot cut this GPU so.
    """
    try:
        cuda: Any = importlib.import_module("cuda.core")
    except ImportError:
        raise ConfigError(
            f"parallel.slices = true: {not_installed('cuda-core')}, or set it to false"
        ) from None
    torch.cuda.init()
    try:
        gpu = cuda.Device(device)
        # This is torch's own (primary) context. Its memory, kernels and events serve the slices.
        gpu.set_current()
        groups = _split(cuda, gpu.resources.sm, slices)
        contexts = [gpu.create_context(cuda.ContextOptions(resources=[group])) for group in groups]
        streams = [context.create_stream() for context in contexts]
    except ConfigError:
        raise
    except Exception as error:
        # cuda-core reports an old driver or old bindings by ValueError, RuntimeError or its own.
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"parallel.slices = true: CUDA cannot cut device {device} into slices ({reason}); set "
            "it to false"
        ) from error
    return tuple(
        SmSlice(
            group.sm_count, torch.cuda.ExternalStream(int(stream.handle), device), (context, stream)
        )
        for group, context, stream in zip(groups, contexts, streams, strict=True)
    )


def _split(cuda: Any, whole: Any, slices: int) -> Sequence[Any]:
    """Makes equal groups, as large as possible. Only trying tells how large."""
    refused: Exception | None = None
    for count in sizes(
        whole.sm_count, slices, whole.min_partition_size, whole.coscheduled_alignment
    ):
        try:
            groups, _ = whole.split(cuda.SMResourceOptions(count=[count] * slices))
        except Exception as error:
            refused = error
            continue
        # The older of the driver's two calls rounds up, and may then give fewer.
        if len(groups) == slices and len({group.sm_count for group in groups}) == 1:
            return groups
    why = "" if refused is None else f" ({' '.join(str(refused).split())})"
    raise ConfigError(
        f"parallel.slices = true: {slices} slices do not fit {whole.sm_count} SMs{why}; use a "
        "smaller parallel.pipeline"
    )
