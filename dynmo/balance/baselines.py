"""Placements of other systems, as published: for comparison, with their faults.

DeepSpeed (runtime/utils.py, the pipeline module's `partition_method`): "uniform" counts layers.
"parameters" and "type:REGEX" balance weights by bisecting the bottleneck with a linear probe.
DynMo's "partition by time" is the same on measured times (section 3.3). The tests show these
faults, which `partition.exact` does not have:

- It stops at an absolute tolerance of 1e-3. This is right for parameters. It is up to a tenth off
  for layers that take some milliseconds.
- A stage may stay empty if a layer weighs as much as the bottleneck. Stages also stay empty if
  there are no more layers than stages.
- A load equal to the bottleneck counts as too much.
- The probe never ends if there are fewer layers than stages.

Megatron-LM: every stage has the same number of transformer blocks, which must divide. The embedding
sits on the first stage, and the loss on the last. They come on top or count as a block each
(`account_for_embedding_in_pipeline_split`, `account_for_loss_in_pipeline_split`).

DynMo's Algorithm 3 is `diffusion.published_diffusion`. `in_order` says whether its result can run.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise

from dynmo.balance.blocks import blocks_of
from dynmo.balance.diffusion import Transfers
from dynmo.balance.partition import Partition
from dynmo.errors import PartitionError

TOLERANCE = 1e-3


def deepspeed_uniform(items: int, parts: int, *, rest_last: bool = False) -> list[int]:
    """Bounds with items // parts in each part. The first parts take one more each."""
    if items <= parts:
        return [min(part, items) for part in range(parts + 1)]
    each, more = divmod(items, parts)
    if rest_last:
        return [each * part for part in range(parts)] + [items]
    return [each * part + min(part, more) for part in range(parts + 1)]


def deepspeed_balanced(
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
        return deepspeed_uniform(len(weights), parts)
    sums = list(accumulate(weights))
    low, high = sums[-1] / parts, sums[-1]
    while high > low + tolerance:
        middle = low + (high - low) / 2
        # The published code never ends here: for large loads the tolerance is less than a rounding
        # error.
        if not low < middle < high:
            break
        _, enough = deepspeed_probe(sums, parts, middle)
        low, high = (low, middle) if enough else (middle + tolerance, high)
    bounds, enough = deepspeed_probe(sums, parts, high)
    if not enough:
        raise PartitionError(
            "DeepSpeed's partitioning fails on these weights: "
            f"no placement within its own bottleneck {high:g}; use 'exact'"
        )
    return bounds


def deepspeed_probe(sums: Sequence[float], parts: int, bottleneck: float) -> tuple[list[int], bool]:
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


def deepspeed_type(names: Sequence[str], pattern: str, parts: int) -> list[int]:
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
    return deepspeed_balanced(weights, parts)


def megatron_uniform(
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
