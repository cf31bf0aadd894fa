"""Activation checkpointing, layer by layer.

A recomputed layer keeps only its input from F to B, and runs F once more at the start of its B.

                   b      live from F to B               live from B to W
    kept           b      activation_bytes               stash_bytes
    recomputed     b + f  the layer before's output      stash_bytes

A backward goes through a stage from its last layer to its first, so one layer's activations are
back at a time. They count as its workspace.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import zip_longest

from dynmo.cost.layer_cost import LayerCost
from dynmo.errors import NoRoomError
from dynmo.plan.partition import Partition
from dynmo.schedule.op import Schedule
from dynmo.schedule.simulator import resident


def with_recompute(layers: Sequence[LayerCost], chosen: Collection[int]) -> tuple[LayerCost, ...]:
    """The costs of the same layers if those of `chosen` are recomputed.

    A layer without B (in a frozen prefix) keeps nothing anyway, and stays as it is. The activations
    that recomputing brings back count as workspace of F and B. The first layer's input is assumed
    to be as large as its output. This is a bound, because the layer reads tokens.
    """
    out = list(layers)
    for index in chosen:
        layer = layers[index]
        if layer.b or layer.w:
            kept = min(layer.activation_bytes, layers[max(0, index - 1)].output_bytes)
            out[index] = replace(_keeping(layer, kept), b=layer.b + layer.f)
    return tuple(out)


def _keeping(layer: LayerCost, kept: int) -> LayerCost:
    """The layer if it keeps only `kept` bytes. It brings the rest back while F and B run."""
    back = layer.activation_bytes - kept
    return replace(
        layer,
        activation_bytes=kept,
        workspace_bytes=layer.workspace_bytes + back,
        forward_workspace_bytes=layer.forward_workspace_bytes + back,
    )


def recompute_as_workspace(
    costs: Sequence[LayerCost], chosen: Collection[int]
) -> tuple[LayerCost, ...]:
    """Adds the recomputation of the layers of `chosen` to costs that were derived from shapes.

    Shapes tell no times, so every layer counts the same.
    """
    layers = [replace(c, f=1.0, b=1.0, w=1.0) for c in costs]
    recomputed = list(with_recompute(layers, chosen))
    if 0 in chosen:  # the first layer keeps a part of the batch, which is there anyway
        recomputed[0] = _keeping(recomputed[0], 0)
    return tuple(recomputed)


Memory = Callable[[tuple[LayerCost, ...]], tuple[int, ...]]
"""Gives the bytes of each rank at its peak, from the layers' costs with recomputation."""


def choose_recomputed(
    layers: Sequence[LayerCost],
    partition: Partition,
    schedule: Schedule,
    memory: Memory,
    limits: Sequence[int],
) -> frozenset[int]:
    """Chooses the layers to recompute so that every rank fits its limit.

    A rank that is too full takes layers until it fits. The layer that saves the most bytes per
    second of F is taken first. Then layers that turn out not to be needed are given back, the most
    expensive first. Ranks do not disturb each other, so all of them try a layer at once.

    Args:
        layers: Cost of each layer without recomputing.
        partition: The placement.
        schedule: The schedule that runs.
        memory: The account of the memory under this placement and schedule.
        limits: Bytes of each rank.

    Raises:
        NoRoomError: Not even recomputing everything fits. The message says by how much.
    """
    every = with_recompute(layers, range(len(layers)))
    saved = [a.activation_bytes - b.activation_bytes for a, b in zip(layers, every, strict=True)]
    for rank, (least, most) in enumerate(zip(memory(every), limits, strict=True)):
        if least > most:
            raise NoRoomError(
                f"rank {rank} needs {least} bytes under {schedule.name} even when all its layers "
                f"are recomputed, {least - most} over the "
                f"limit of {most}; use more ranks, smaller microbatches, or a schedule that "
                "keeps fewer in flight"
            )
    # The bytes that a layer saves count once for each microbatch of its stage that waits for B.
    waiting = [max((kept for kept, _ in pairs), default=0) for pairs in resident(schedule)]

    def gain(index: int) -> tuple[float, int]:
        kept = saved[index] * waiting[partition.owner(index)]
        return kept / (layers[index].f or 1e-30), -index

    def needs(some: Collection[int]) -> tuple[int, ...]:
        return memory(with_recompute(layers, some))

    ranked: list[list[int]] = [[] for _ in limits]
    for index in sorted(filter(saved.__getitem__, range(len(layers))), key=gain, reverse=True):
        ranked[schedule.stage_ranks[partition.owner(index)]].append(index)
    # The fewest of each rank, in this order, that are enough: by bisection, on all ranks at once.
    low, high = [0] * len(limits), list(map(len, ranked))
    while low != high:
        middle = [(a + b) // 2 for a, b in zip(low, high, strict=True)]
        now = needs({i for own, count in zip(ranked, middle, strict=True) for i in own[:count]})
        for rank, half in enumerate(middle):
            if low[rank] < high[rank] and now[rank] <= limits[rank]:
                high[rank] = half
            elif low[rank] < high[rank]:
                low[rank] = half + 1
    taken = [
        sorted(own[:count], key=lambda i: (-layers[i].f, i))
        for own, count in zip(ranked, high, strict=True)
    ]
    chosen = {index for own in taken for index in own}
    for tried in zip_longest(*taken):
        then = needs(chosen - set(tried))
        chosen -= {i for i, a, b in zip(tried, then, limits, strict=True) if a <= b}
    return frozenset(chosen)
