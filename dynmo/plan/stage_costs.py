"""From a placement of layers to the costs of stages and boundaries.

The simulator and the schedulers take these costs.

    layers    e  a f | a f | a f  h    a layer's F, B, W, bytes
    stages       0   |  1  |   2       sums of the layers, divided by the speed of the stage's rank
    links          out0  out1          time of the last layer's output over the link behind it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile

from dynmo.cost.layer_cost import Costs, LayerCost, LinkCost, stage_costs
from dynmo.errors import PartitionError
from dynmo.plan.partition import Partition
from dynmo.schedule.catalogue import make
from dynmo.schedule.op import Schedule

Make = Callable[[Costs], Schedule]
"""The schedule that would run at these costs. `frozen_stages` tells it of a frozen prefix."""


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
    stages = stage_costs(layers, partition.counts)
    check_lengths(partition.stages, links, speeds)
    if speeds is not None:
        stages = tuple(
            replace(x, f=x.f / v, b=x.b / v, w=x.w / v) for x, v in zip(stages, speeds, strict=True)
        )
    if links is None:
        return Costs(stages, (0.0,) * (partition.stages - 1))
    ends = partition.bounds[1:-1]
    return Costs(
        stages,
        tuple(
            link.seconds(layers[end - 1].output_bytes)
            for link, end in zip(links, ends, strict=True)
        ),
    )


def check_lengths(
    stages: int, links: Sequence[LinkCost] | None, speeds: Sequence[float] | None
) -> None:
    if links is not None and len(links) != stages - 1:
        raise PartitionError(
            f"{len(links)} links for {stages} stages; give {stages - 1}, one per boundary"
        )
    if speeds is not None and len(speeds) != stages:
        raise PartitionError(f"{len(speeds)} speeds for {stages} stages; give one per stage")


def freeze(layers: Sequence[LayerCost], first_trainable_layer: int) -> tuple[LayerCost, ...]:
    """Turns the layers before `first_trainable_layer` into a frozen prefix.

    A frozen layer runs forward only and keeps nothing.
    """
    if not 0 <= first_trainable_layer < max(1, len(layers)):
        raise PartitionError(
            f"first trainable layer {first_trainable_layer} of {len(layers)} layers; "
            "at least the last must train"
        )
    frozen = (
        replace(x, b=0.0, w=0.0, activation_bytes=0, stash_bytes=0)
        for x in layers[:first_trainable_layer]
    )
    return (*frozen, *layers[first_trainable_layer:])


def frozen_stages(costs: Costs) -> int:
    """Stages at the front that have neither B nor W. The last stage always counts as training."""
    return len(list(takewhile(lambda x: x.b == 0 and x.w == 0, costs.stages[:-1])))


def by_name(name: str, microbatches: int) -> Make:
    """Makes the schedule called `name`, with the frozen prefix that the costs show."""
    return lambda costs: make(
        name, len(costs.stages), microbatches, first_trainable=frozen_stages(costs)
    )
