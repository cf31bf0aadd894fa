"""Slices of one GPU: disjoint groups of its SMs with a stream on each, so that several stages
compute at once.

It follows the documentation of cuda-core 1.2 and of CUDA's green contexts. `make gpu` has run it on
an H100.

    132 SMs, 4 slices:   | 32 | 32 | 32 | 32 | 4 left over, of no slice

This is overlap on slices of one GPU, not several GPUs: memory, its bandwidth and the L2 cache are
shared.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from dynmo.errors import ConfigError
from dynmo.runtime.engine.stage_streams import DefaultStream, SliceStreams, StageStreams


class SmSlice(NamedTuple):
    """sms: how many SMs compute what the stream is given. owner: what must live as long as the
    stream."""

    sms: int
    stream: torch.cuda.Stream
    owner: Any


def make_streams(device: torch.device, slices: int, placement: Sequence[int]) -> StageStreams:
    """A stream on each of so many slices of a CUDA device. On CPU all stages compute in turn.
    placement: the slice of each stage."""
    if device.type != "cuda":
        return DefaultStream()
    return SliceStreams([each.stream for each in cut(device.index or 0, slices)], placement)


def sizes(sms: int, slices: int, least: int, step: int) -> range:
    """SMs of a slice to try, largest first: multiples of `step`, none under `least`."""
    step = max(1, step)
    return range(sms // slices // step * step, max(1, least) - 1, -step)


@cache  # once a process: the groups of two splits overlap, and torch keeps memory for a stream that must not end before it
def cut(device: int, slices: int) -> tuple[SmSlice, ...]:
    """So many equal slices, all from one split (torch.cuda.green_contexts splits anew for each
    context, and its groups overlap).

    Raises ConfigError where cuda-core is missing, or the driver cannot cut this GPU so.
    """
    try:
        cuda: Any = importlib.import_module("cuda.core")
    except ImportError:
        raise ConfigError(
            "parallel.slices = true needs cuda-core; pip install cuda-core, or set it to false"
        ) from None
    torch.cuda.init()
    try:
        gpu = cuda.Device(device)
        gpu.set_current()  # torch's own (primary) context: its memory, kernels and events serve the slices too
        groups = _split(cuda, gpu.resources.sm, slices)
        contexts = [gpu.create_context(cuda.ContextOptions(resources=[group])) for group in groups]
        streams = [context.create_stream() for context in contexts]
    except ConfigError:
        raise
    except Exception as error:  # cuda-core says by ValueError, RuntimeError or its own that driver or bindings are too old
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"parallel.slices = true: CUDA cannot cut device {device} into slices ({reason}); set it to false"
        ) from error
    return tuple(
        SmSlice(
            group.sm_count, torch.cuda.ExternalStream(int(stream.handle), device), (context, stream)
        )
        for group, context, stream in zip(groups, contexts, streams, strict=True)
    )


def _split(cuda: Any, whole: Any, slices: int) -> Sequence[Any]:
    """One split into equal groups, as large as the GPU's topology allows: what it allows, only
    trying tells."""
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
        f"parallel.slices = true: {slices} slices do not fit {whole.sm_count} SMs{why}; use a smaller parallel.pipeline"
    )
