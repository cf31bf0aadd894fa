"""Placements of other systems, as published: for comparison, with their faults.

Each is a balancer for `balance.balancer = "python:benchmarks.baselines.placements:NAME"`.

DeepSpeed (runtime/utils.py, the pipeline module's `partition_method`): "uniform" counts layers.
"parameters" and "type:REGEX" balance weights by bisecting the bottleneck with a linear probe.
DynMo's "partition by time" is the same on measured times (section 3.3). The tests show these
faults, which `bisection.exact` does not have:

- It stops at an absolute tolerance of 1e-3. This is right for parameters. It is up to a tenth off
  for layers that take some milliseconds.
- A stage may stay empty if a layer weighs as much as the bottleneck. Stages also stay empty if
  there are no more layers than stages.
- A load equal to the bottleneck counts as too much.
- The probe never ends if there are fewer layers than stages.

Megatron-LM: every stage has the same number of transformer blocks, which must divide. The embedding
sits on the first stage, and the loss on the last. They come on top or count as a block each
(`account_for_embedding_in_pipeline_split`, `account_for_loss_in_pipeline_split`).

DynMo's Algorithm 3 loses the order of the layers. `in_order` says whether its result can run.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, takewhile

from dynmo.cli.placement_formats import blocks_of
from dynmo.errors import PartitionError
from dynmo.plan.balancers import Balancer
from dynmo.plan.bisection import integer_sums
from dynmo.plan.evaluate import Plan
from dynmo.plan.partition import Cost, Move, Partition, weigh
from dynmo.plan.problem import Problem
from dynmo.schedule.memory import MemoryLimits
from dynmo.schedule.simulator import resident

TOLERANCE = 1e-3


def uniform_bounds(items: int, parts: int, *, rest_last: bool = False) -> list[int]:
    """Bounds with items // parts in each part. The first parts take one more each."""
    if items <= parts:
        return [min(part, items) for part in range(parts + 1)]
    each, more = divmod(items, parts)
    if rest_last:
        return [each * part for part in range(parts)] + [items]
    return [each * part + min(part, more) for part in range(parts + 1)]


def balanced_bounds(
    weights: Sequence[float], parts: int, *, tolerance: float = TOLERANCE
) -> list[int]:
    """Bounds by bisecting the bottleneck between the mean and the sum of the weights.

    Args:
        weights: One per item.
        parts: Number of parts. Parts may be empty.
        tolerance: The bisection ends when its two ends are this near.

    Returns:
        First item of each part, then the number of items.

    Raises:
        PartitionError: The published code fails on its own assertion, because its probe refuses the
            bottleneck that it ends at.
    """
    if len(weights) <= parts:
        return uniform_bounds(len(weights), parts)
    sums = list(accumulate(weights))
    low, high = sums[-1] / parts, sums[-1]
    while high > low + tolerance:
        middle = low + (high - low) / 2
        # The published code never ends here: for large loads the tolerance is less than a rounding
        # error.
        if not low < middle < high:
            break
        _, enough = probe(sums, parts, middle)
        low, high = (low, middle) if enough else (middle + tolerance, high)
    bounds, enough = probe(sums, parts, high)
    if not enough:
        raise PartitionError(
            "DeepSpeed's partitioning fails on these weights: "
            f"no placement within its own bottleneck {high:g}; use 'exact'"
        )
    return bounds


def probe(sums: Sequence[float], parts: int, bottleneck: float) -> tuple[list[int], bool]:
    """Fills the parts in order with sums that stay under `bottleneck`.

    Returns:
        The bounds, and whether the parts were enough.
    """
    items = len(sums)
    stride = items // parts
    if stride == 0:
        raise PartitionError(
            f"DeepSpeed's probe never ends for {items} layers on {parts} stages; "
            "it needs at least as many layers as stages"
        )
    bounds = [0] + [items] * parts
    target, at = bottleneck, stride
    for part in range(1, parts):
        while at < items and sums[at] < target:
            at += stride
        bounds[part] = bisect_left(sums, target, lo=at - stride, hi=min(at, items))
        if bounds[part] == items:
            # As published: subtracts the sum including the part's first item, one item too many.
            return bounds, sums[-1] - sums[bounds[part - 1]] < bottleneck
        # As published: with nothing placed yet, index -1 is the sum of everything.
        target = sums[bounds[part] - 1] + bottleneck
    return bounds, target >= sums[-1]


def type_bounds(names: Sequence[str], pattern: str, parts: int) -> list[int]:
    """Bounds that balance how many layers have a name in which `pattern` is found."""
    try:
        wanted = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise PartitionError(f"type:{pattern} is not a regular expression: {error}") from error
    weights = [1.0 if wanted.search(name) else 0.0 for name in names]
    if not any(weights):
        raise PartitionError(
            f"type:{pattern} is found in no layer's name; they are {', '.join(names[:3])}, ..."
        )
    return balanced_bounds(weights, parts)


def megatron_placement(
    names: Sequence[str], stages: int, *, embedding: bool = False, loss: bool = False
) -> Partition:
    """The same number of whole blocks on every stage."""
    first, blocks, _ = blocks_of(names)
    counted = len(blocks) + embedding + loss
    each, rest = divmod(counted, stages)
    if rest or not each:
        what = f"{len(blocks)} blocks" + " and the embedding" * embedding + " and the loss" * loss
        raise PartitionError(
            f"Megatron's uniform placement needs a multiple of {stages} blocks for {stages} "
            f"stages, not {what}; use 'exact'"
        )
    per_stage = [each] * stages
    per_stage[0] -= embedding
    per_stage[-1] -= loss
    ends = [first, *(block.stop for block in blocks)]
    bounds = [ends[blocks_before] for blocks_before in accumulate(per_stage, initial=0)]
    return placement([0, *bounds[1:-1], len(names)], "Megatron's uniform placement")


def placement(bounds: Sequence[int], whose: str) -> Partition:
    """Converts bounds to a `Partition`."""
    for stage, (start, stop) in enumerate(pairwise(bounds)):
        if stop <= start:
            raise PartitionError(
                f"{whose} leaves stage {stage} without a layer (bounds {list(bounds)}), which "
                "cannot run; use 'exact'"
            )
    return Partition.from_bounds(bounds)


def in_order(transfers: Transfers) -> Partition:
    """Converts the result of Algorithm 3 to a `Partition`."""
    bounds = [0]
    for rank, held in enumerate(transfers.ranks):
        if sorted(held) != list(range(bounds[-1], bounds[-1] + len(held))) or not held:
            raise PartitionError(
                f"Algorithm 3 leaves rank {rank} with the layers {list(held)}, out of the "
                "network's order: that cannot run; use 'diffusion'"
            )
        bounds.append(bounds[-1] + len(held))
    return Partition.from_bounds(bounds)


@dataclass(frozen=True)
class Transfers:
    """The result of Algorithm 3.

    Attributes:
        ranks: The layers of each rank, in the order in which the rank holds them.
        moves: The transfers in order.
    """

    ranks: tuple[tuple[int, ...], ...]
    moves: tuple[Move, ...]


def published_diffusion(
    weights: Sequence[float],
    current: Partition,
    *,
    layer_bytes: Sequence[int] | None = None,
    limits: Sequence[int] | None = None,
    iterations: int = 100,
) -> Transfers:
    """DynMo's Algorithm 3 (appendix C.3), on loads alone.

    Every overloaded rank offers its lightest layer to the least loaded rank, wherever that sits.
    The receiver appends it. A rank then holds layers that are not neighbours, and the network would
    run in another order. The result is therefore sets of layers, not a `Partition`. As published,
    memory is a sum of bytes per layer, whatever the schedule keeps.

    The printed text compares with the variance of the start of the iteration. This function
    compares with the present variance, because the stale one accepts transfers that worsen the
    balance.

    Args:
        weights: Load of each layer.
        current: The placement to start from.
        layer_bytes: Bytes of each layer. Needs `limits`.
        limits: Bytes of each rank. Needs `layer_bytes`.
        iterations: The most iterations. An iteration that accepts nothing is the last.

    Raises:
        PartitionError: The weights are for another number of layers, or only one of `layer_bytes`
            and `limits` is given.
    """
    if len(weights) != current.layers:
        raise PartitionError(
            f"{len(weights)} weights for a placement of {current.layers} layers; "
            "give one weight per layer"
        )
    sums = integer_sums(weights)
    if (layer_bytes is None) != (limits is None):
        raise PartitionError(
            "a memory check needs both layer_bytes and limits; give both or neither"
        )
    weight = [stop - start for start, stop in pairwise(sums)]
    ranks = [list(current.range_of(rank)) for rank in range(current.stages)]
    load = [sum(weight[layer] for layer in held) for held in ranks]

    def has_room(target: int, layer: int) -> bool:
        if layer_bytes is None or limits is None:
            return True
        held = sum(layer_bytes[other] for other in ranks[target])
        return held + layer_bytes[layer] <= limits[target]

    done: list[Move] = []
    for _ in range(iterations):
        accepted = len(done)
        overloaded = [
            rank for rank in range(current.stages) if load[rank] * current.stages > sums[-1]
        ]
        for source in overloaded:
            target = min(range(current.stages), key=lambda rank: load[rank])
            layer = min(ranks[source], key=lambda held: weight[held], default=None)
            if layer is None or target == source:
                continue
            # Two loads change and the mean does not. The variance falls by
            # 2 w (load of source - load of target - w) / ranks.
            falls = weight[layer] * (load[source] - load[target] - weight[layer]) > 0
            if not falls or not has_room(target, layer):
                continue
            ranks[source].remove(layer)
            ranks[target].append(layer)
            load[source] -= weight[layer]
            load[target] += weight[layer]
            done.append(Move(layer, source, target))
        if len(done) == accepted:
            break
    return Transfers(tuple(map(tuple, ranks)), tuple(done))


# -- the balancers ---------------------------------------------------------------------------------


def forced(balance: Balancer) -> Balancer:
    """Says of a balancer that its placement is taken whatever a step takes there."""
    balance.__dict__["forced"] = True
    return balance


@forced
def deepspeed_uniform(problem: Problem, now: Plan) -> Partition:
    bounds = uniform_bounds(len(now.layers), now.partition.stages)
    return placement(bounds, "DeepSpeed's uniform placement")


def _deepspeed(now: Plan, cost: Cost) -> Partition:
    bounds = balanced_bounds(weigh(now.layers, cost), now.partition.stages)
    return placement(bounds, f"DeepSpeed's placement by {cost}")


def deepspeed_parameters(problem: Problem, now: Plan) -> Partition:
    return _deepspeed(now, "parameters")


def deepspeed_time(problem: Problem, now: Plan) -> Partition:
    return _deepspeed(now, "time")


def deepspeed_type(pattern: str) -> Balancer:
    """The balancer that goes by the layers whose names match a regular expression."""

    def balance(problem: Problem, now: Plan) -> Partition:
        bounds = type_bounds(problem.profile.names, pattern, now.partition.stages)
        return placement(bounds, f"DeepSpeed's placement by type:{pattern}")

    return balance


@forced
def megatron_uniform(problem: Problem, now: Plan) -> Partition:
    return megatron_placement(problem.profile.names, now.partition.stages)


@forced
def megatron_embedding_loss(problem: Problem, now: Plan) -> Partition:
    return megatron_placement(
        problem.profile.names, now.partition.stages, embedding=True, loss=True
    )


def algorithm_3(problem: Problem, now: Plan) -> Partition:
    weights, limits = weigh(now.layers, problem.work.cost), now.replica.limits
    sizes = None if limits is None else [x.static_bytes + x.activation_bytes for x in now.layers]
    return in_order(published_diffusion(weights, now.partition, layer_bytes=sizes, limits=limits))


@forced
def random(problem: Problem, now: Plan) -> Partition:
    """Any other placement that fits, each with the same chance.

    Returns the present one if there is no other. The generator is a hash of (seed, step), so it is
    the same on every rank.
    """
    layers, ranks, memory = len(now.layers), now.partition.stages, _room(now)

    def room(stage: int, start: int) -> int:
        last = layers - (ranks - 1 - stage)
        if memory is not None:
            fits = (memory.fits(stage, start, stop) for stop in range(start + 1, last + 1))
            last = min(last, start + sum(takewhile(bool, fits)))
        return last

    # ways[stage][start] is the number of placements of the layers from `start` on, on the stages
    # from `stage` on. below[...] are running sums, so that a range of ends is one subtraction.
    ways = [[0] * layers + [1]]
    below: list[list[int]] = []
    for stage in reversed(range(ranks)):
        below.append(list(accumulate(ways[-1], initial=0)))
        ways.append(
            [
                max(0, below[-1][room(stage, start) + 1] - below[-1][start + 1])
                for start in range(layers)
            ]
            + [0]
        )
    ways.reverse()
    below.reverse()
    # Placements are numbered in lexicographic order. The number of the current one is skipped.
    fits = memory is None or all(
        memory.fits(s, span.start, span.stop)
        for s, span in enumerate(map(now.partition.range_of, range(ranks)))
    )
    total = ways[0][0] - fits
    if total < 1:
        return now.partition
    work = problem.work
    digest = hashlib.sha256(f"balancer random {work.seed} {work.step}".encode()).digest()
    number = int.from_bytes(digest) % total
    bounds = now.partition.bounds
    own = sum(below[s][bounds[s + 1]] - below[s][bounds[s] + 1] for s in range(ranks))
    if fits and number >= own:
        number += 1
    picked = [0]
    for stage in range(ranks):
        end = picked[-1] + 1
        while number >= ways[stage + 1][end]:
            number -= ways[stage + 1][end]
            end += 1
        picked.append(end)
    return Partition.from_bounds(picked)


def _room(now: Plan) -> MemoryLimits | None:
    """The limits of the stages, less the largest workspace. None: there are none."""
    limits = now.replica.limits
    if limits is None:
        return None
    aside = max((layer.workspace_bytes for layer in now.layers), default=0)
    of_stages = tuple(max(0, limits[rank] - aside) for rank in now.stage_ranks)
    return MemoryLimits(now.layers, resident(now.schedule), of_stages)
