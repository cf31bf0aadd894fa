"""How others place layers, as they published it: for comparison, with their faults.

DeepSpeed (runtime/utils.py, the pipeline module's `partition_method`): "uniform" counts layers,
"parameters" and "type:REGEX" balance weights by bisecting the bottleneck with a linear probe;
DynMo's "partition by time" is the same on measured times (section 3.3). What the tests show of it,
and `partition.exact` does without:

- it stops at an absolute tolerance of 1e-3: right for parameters, and up to a tenth off for layers that take some milliseconds;
- a stage may stay empty, where a layer weighs as much as the bottleneck, and wherever layers are no more than stages;
- a load equal to the bottleneck counts as too much; and with fewer layers than stages the probe never ends.

Megatron-LM: the same number of transformer blocks on every stage, which must divide; the embedding
sits on the first stage, the loss on the last, on top or counted as a block each
(`account_for_embedding_in_pipeline_split`, `account_for_loss_in_pipeline_split`).

DynMo's Algorithm 3 is `diffusion.published_diffusion`; `in_order` says whether what it arrives at
can run at all.
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
    """Bounds with items // parts in each part; the first parts take one more each. In older
    versions (`rest_last`) the last part takes all that is left. With fewer items than parts the
    last parts are empty."""
    if items <= parts:
        return [min(part, items) for part in range(parts + 1)]
    each, more = divmod(items, parts)
    if rest_last:
        return [each * part for part in range(parts)] + [items]
    return [each * part + min(part, more) for part in range(parts + 1)]


def deepspeed_balanced(
    weights: Sequence[float], parts: int, *, tolerance: float = TOLERANCE
) -> list[int]:
    """Bounds by bisecting the bottleneck between the mean and the sum until they are `tolerance`
    apart. Parts may be empty.

    Raises PartitionError where the published code fails on its own assertion: its probe refuses the
    bottleneck that it ends at.
    """
    if len(weights) <= parts:
        return deepspeed_uniform(len(weights), parts)
    sums = list(accumulate(weights))
    low, high = sums[-1] / parts, sums[-1]
    while high > low + tolerance:
        middle = low + (high - low) / 2
        if (
            not low < middle < high
        ):  # of large loads the tolerance is less than a rounding error: as published, it never ends
            break
        _, enough = deepspeed_probe(sums, parts, middle)
        low, high = (low, middle) if enough else (middle + tolerance, high)
    bounds, enough = deepspeed_probe(sums, parts, high)
    if not enough:
        raise PartitionError(
            f"DeepSpeed's partitioning fails on these weights: no placement within its own bottleneck {high:g}; use 'exact'"
        )
    return bounds


def deepspeed_probe(sums: Sequence[float], parts: int, bottleneck: float) -> tuple[list[int], bool]:
    """Fills the parts in order with sums that stay under `bottleneck`; whether that was enough.
    sums: of the weights up to each item.

    Raises PartitionError for fewer items than parts, where the published loop never ends.
    """
    items = len(sums)
    stride = items // parts
    if stride == 0:
        raise PartitionError(
            f"DeepSpeed's probe never ends for {items} layers on {parts} stages; it needs at least as many layers as stages"
        )
    bounds = [0] + [items] * parts
    target, at = bottleneck, stride
    for part in range(1, parts):
        while at < items and sums[at] < target:
            at += stride
        bounds[part] = bisect_left(sums, target, lo=at - stride, hi=min(at, items))
        if bounds[part] == items:
            # As published: the sum up to and with the part's first item is taken off, one item too
            # many.
            return bounds, sums[-1] - sums[bounds[part - 1]] < bottleneck
        # As published: with nothing placed yet, index -1 is the sum of everything.
        target = sums[bounds[part] - 1] + bottleneck
    return bounds, target >= sums[-1]


def deepspeed_type(names: Sequence[str], pattern: str, parts: int) -> list[int]:
    """Bounds that balance how many layers have a name in which `pattern` is found, upper and lower
    case alike.

    Raises PartitionError where none has, or the pattern is no regular expression.
    """
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
    """The same number of whole blocks on every stage; `embedding` and `loss` count as a block each.

    Raises PartitionError where the blocks do not divide by the stages: Megatron refuses them too.
    """
    first, blocks, _ = blocks_of(names)
    counted = len(blocks) + embedding + loss
    each, rest = divmod(counted, stages)
    if rest or not each:
        what = f"{len(blocks)} blocks" + " and the embedding" * embedding + " and the loss" * loss
        raise PartitionError(
            f"Megatron's uniform placement needs a multiple of {stages} blocks for {stages} stages, not {what}; use 'exact'"
        )
    per_stage = [each] * stages
    per_stage[0] -= embedding
    per_stage[-1] -= loss
    ends = [first, *(block.stop for block in blocks)]
    bounds = [ends[blocks_before] for blocks_before in accumulate(per_stage, initial=0)]
    return placement([0, *bounds[1:-1], len(names)], "Megatron's uniform placement")


def placement(bounds: Sequence[int], whose: str) -> Partition:
    """As a `Partition`. Raises PartitionError naming the first empty stage: nothing could run
    there."""
    for stage, (start, stop) in enumerate(pairwise(bounds)):
        if stop <= start:
            raise PartitionError(
                f"{whose} leaves stage {stage} without a layer (bounds {list(bounds)}), which cannot run; use 'exact'"
            )
    return Partition.from_bounds(bounds)


def in_order(transfers: Transfers) -> Partition:
    """As a `Partition`. Raises PartitionError naming the first rank whose layers are not the
    neighbours of the rank's before."""
    bounds = [0]
    for rank, held in enumerate(transfers.ranks):
        if sorted(held) != list(range(bounds[-1], bounds[-1] + len(held))) or not held:
            raise PartitionError(
                f"Algorithm 3 leaves rank {rank} with the layers {list(held)}, out of the network's order: that cannot run; use 'diffusion'"
            )
        bounds.append(bounds[-1] + len(held))
    return Partition.from_bounds(bounds)
