"""What the layers of a mesh, and the stages of a placement, cost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import takewhile

from dynmo.cost.costs_file import TIMES
from dynmo.cost.layer_cost import Costs, LayerCost, LinkCost, StageCost, stage_costs
from dynmo.plan.partition import Partition

_PER_MICROBATCH = (
    "activation_bytes",
    "stash_bytes",
    "output_bytes",
    "workspace_bytes",
    "forward_workspace_bytes",
    "weight_workspace_bytes",
)


def scale_layers(layers: Iterable[LayerCost], share: float) -> tuple[LayerCost, ...]:
    """The costs of a microbatch of `share` times the size.

    Seconds, activations and messages are in proportion. Real kernels do less well on small
    microbatches, so a measurement at that size is better.
    """
    return tuple(
        replace(
            x,
            **{key: getattr(x, key) * share for key in TIMES},
            **{key: math.ceil(getattr(x, key) * share) for key in _PER_MICROBATCH},
        )
        for x in layers
    )


def freeze(layers: Sequence[LayerCost], first_trainable_layer: int) -> tuple[LayerCost, ...]:
    """Turns the layers before `first_trainable_layer` into a frozen prefix.

    A frozen layer runs forward only and keeps nothing.
    """
    assert 0 <= first_trainable_layer < max(1, len(layers)), "at least the last layer trains"
    frozen = (
        replace(x, b=0.0, w=0.0, activation_bytes=0, stash_bytes=0)
        for x in layers[:first_trainable_layer]
    )
    return (*frozen, *layers[first_trainable_layer:])


def pipeline_costs(
    layers: Sequence[LayerCost],
    partition: Partition,
    *,
    links: Sequence[LinkCost] | None = None,
    speeds: Sequence[float] | None = None,
) -> Costs:
    """The costs of the stages and boundaries of `partition`.

    There is one link per boundary and one speed per stage. Without links messages take no time.
    """
    stages, ends = stage_costs(layers, partition.counts), partition.bounds[1:-1]
    if speeds is not None:
        stages = tuple(
            replace(x, f=x.f / v, b=x.b / v, w=x.w / v) for x, v in zip(stages, speeds, strict=True)
        )
    if links is None:
        return Costs(stages, (0.0,) * len(ends))
    sent = (layers[end - 1].output_bytes for end in ends)
    seconds = (link.seconds(size) for link, size in zip(links, sent, strict=True))
    return Costs(stages, tuple(seconds))


def frozen_stages(costs: Costs) -> int:
    """Stages at the front that have neither B nor W. The last stage always counts as training."""
    return len(list(takewhile(lambda x: x.b == 0 and x.w == 0, costs.stages[:-1])))


def with_unit_memory(costs: Costs) -> Costs:
    """Gives every stage activations of 1 if no sizes are known.

    A schedule should not take memory for free.
    """
    if any(stage.mem_f for stage in costs.stages):
        return costs
    return Costs(tuple(StageCost(x.f, x.b, x.w) for x in costs.stages), costs.links)


def one_microbatch(costs: Costs, stage_ranks: Sequence[int]) -> tuple[float, ...]:
    """The memory that one microbatch keeps alive on each rank, in the costs' unit."""
    kept = [0.0] * (max(stage_ranks) + 1)
    for stage, rank in zip(costs.stages, stage_ranks, strict=True):
        kept[rank] += stage.held
    return tuple(kept)


def roomy_caps(costs: Costs, stage_ranks: Sequence[int]) -> tuple[float, ...]:
    """Caps without a memory limit: twice the most that 1F1B keeps on a rank.

    1F1B keeps p microbatches there (Zero Bubble's ZB-2p). More gains next to nothing.
    """
    kept = one_microbatch(costs, stage_ranks)
    return (2.0 * len(kept) * max(kept),) * len(kept)


def even_costs(layers: Sequence[LayerCost], stages: int, f: float, b: float, w: float) -> Costs:
    """The costs of stages that all have the same F, B and W, and a share of the activations.

    Messages take no time.
    """
    kept, stash = (
        math.fsum(getattr(x, key) for x in layers) / stages or 1.0
        for key in ("activation_bytes", "stash_bytes")
    )
    stage = StageCost(f, b, w, kept, stash - kept, -stash)
    return Costs((stage,) * stages, (0.0,) * (stages - 1))
