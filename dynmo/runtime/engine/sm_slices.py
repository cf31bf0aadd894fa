"""Slices of one GPU: disjoint groups of its SMs with a stream on each.

Several stages can then compute at once. The code follows the documentation of cuda-core 1.2 and of
CUDA's green contexts. `make gpu` has run it on an H100.

    132 SMs, 4 slices:   | 32 | 32 | 32 | 32 | 4 left over, in no slice

This is overlap on slices of one GPU, not several GPUs. Memory, its bandwidth and the L2 cache are
shared.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from dynmo.errors import ConfigError, not_installed
from dynmo.runtime.engine.stage_streams import SliceStreams, StageStreams


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
