"""Memory of stages and ranks.

It is the state of their layers, and what is live between F, B and W.

    bytes(stage) = sum(static_bytes)
                 + max over (n_f, n_s) of  n_f * sum(activation_bytes) + n_s * sum(stash_bytes)
    bytes(rank)  = sum over its layers of weights and optimizer state
                 + max over its ops of  live + gradients + receives + workspace + reduction

The static bytes are weights, gradients and optimizer state. In the second formula:

- gradients begin with a stage's first W of the step
- receives are those posted for messages to come
- workspace is that of the op
- reduction is the sum over replicas of a stage's gradients, and begins with the stage's last W

With post-validation the gradients of the step before are also live until the verdict on that step,
under the first forwards. The copies that a rollback of that step restores are live as long.

The pairs come from `simulator.resident`. At one time, n_f microbatches of the stage are between F
and B, and n_s between B and W. A frozen prefix keeps nothing: the caller gives its layers with
activation_bytes = stash_bytes = 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise, product

from dynmo.cost.layer_cost import LayerCost
from dynmo.errors import PartitionError
from dynmo.schedule.lowering import Compute, Direction, Verdict, depths, fuse, lower
from dynmo.schedule.op import Kind, Schedule

Pairs = Sequence[tuple[int, int]]


def rank_memory(
    layers: Sequence[LayerCost],
    counts: Sequence[int],
    schedule: Schedule,
    *,
    post_validation: bool = False,
    replicas: int = 1,
    accumulation_groups: int = 1,
) -> tuple[int, ...]:
    """Compute the bytes of each rank at its peak under `schedule`.

    It is the sum of the static memory of the rank's stages and the most they keep alive together.

    Args:
        layers: Cost of each layer in model order.
        counts: Number of layers of each stage. Stages are contiguous.
        schedule: The order of the ops on each rank.
        post_validation: Whether the step before is not final as a step begins.
        replicas: Number of replicas that sum their gradients.
        accumulation_groups: Number of groups in which each replica accumulates its gradients.
    """
    if (sum(counts), len(counts)) != (len(layers), schedule.stages):
        raise PartitionError(
            f"a placement of {sum(counts)} layers on {len(counts)} stages, for {len(layers)} "
            f"layers under a schedule of {schedule.stages}"
        )
    fused = fuse(schedule)  # the form that runs
    pending = _ops_before_verdict(schedule) if post_validation else (None,) * schedule.ranks
    return tuple(
        static + _peak(layers, counts, fused, rank, pending[rank], replicas, accumulation_groups)
        for rank, static in enumerate(static_bytes(bare(layers), counts, schedule.stage_ranks))
    )


def bare(layers: Sequence[LayerCost]) -> list[LayerCost]:
    """Return the layers as they are between steps: weights and optimizer state only."""
    return [
        replace(layer, gradient_bytes=0, rollback_bytes=0, pending_gradient_bytes=0)
        for layer in layers
    ]


# Number of a channel's receives that are posted ahead of need. All receives of a step are posted if
# they are small together.
POSTED_AHEAD = 8
POSTED_SMALL = 16 << 20  # bytes


REDUCED_AT_ONCE = 32 << 20
"""Bytes of a layer's gradients that are reduced over the replicas at one time."""


def reduction_bytes(layers: Sequence[LayerCost]) -> int:
    """Bound the bytes that the reduction of these layers' gradients takes.

    The reduction sums the gradients over replicas. The layers are reduced one after another. Their
    gradients are joined to be sent, and received.
    """
    return 2 * min(REDUCED_AT_ONCE, max((layer.gradient_bytes for layer in layers), default=0))


def posted(messages: int, size: int, depth: int) -> int:
    """Compute how many receives a channel keeps posted.

    `messages` are those of a step, `size` is in bytes, and `depth` is the channel's, in messages.
    """
    if messages <= depth and messages * size <= POSTED_SMALL:
        return messages
    return min(POSTED_AHEAD, depth - 1)


def _ops_before_verdict(schedule: Schedule) -> tuple[int, ...]:
    """Count the ops of each rank before it learns whether the step before is final."""
    out: list[int] = []
    for program in lower(schedule, post_validation=True):
        verdict = next(at for at, x in enumerate(program.instructions) if isinstance(x, Verdict))
        out.append(sum(isinstance(x, Compute) for x in program.instructions[:verdict]))
    return tuple(out)


def _inboxes(
    layers: Sequence[LayerCost], bounds: Sequence[int], schedule: Schedule, rank: int
) -> dict[tuple[int, bool], tuple[int, int]]:
    """Bytes of a message from another rank, and how many receives are kept posted.

    The keys are the stage that takes the message, and whether it is an activation.
    """
    inboxes: dict[tuple[int, bool], tuple[int, int]] = {}
    for (boundary, direction, _, target), depth in depths(schedule).items():
        if target == rank:
            size = layers[bounds[boundary + 1] - 1].output_bytes
            forward = direction is Direction.ACTIVATION
            receives = posted(schedule.microbatches, size, depth)
            inboxes[boundary + forward, forward] = size, receives
    return inboxes


def _peak(
    layers: Sequence[LayerCost],
    counts: Sequence[int],
    schedule: Schedule,
    rank: int,
    pending: int | None,
    replicas: int,
    accumulation_groups: int,
) -> int:
    """The most that a rank holds beside weights and optimizer state.

    A stage has gradients from its first W of the step on. It has more from the first W of an
    accumulation group until the group is summed with others. If the step before is not final, its
    gradients and rollback copies are live under the first `pending` ops.
    """
    bounds, m = [0, *accumulate(counts)], schedule.microbatches
    stages = {s: layers[bounds[s] : bounds[s + 1]] for s in schedule.stages_of(rank)}
    gradients = {s: sum(x.gradient_bytes for x in own) for s, own in stages.items()}
    largest = {s: max((x.gradient_bytes for x in own), default=0) for s, own in stages.items()}
    freed = {(s, k): sum(_freed(x, k) for x in own) for s, own in stages.items() for k in Kind}
    shapes = product(stages.items(), Kind, (False, True))
    workspaces = {(s, k, fresh): _workspace(own, k, fresh) for (s, own), k, fresh in shapes}
    inboxes = _inboxes(layers, bounds, schedule, rank)
    receives = sum(size * min(count, m) for size, count in inboxes.values())
    undecided = 0
    if pending is not None:
        trained = [x for s, own in stages.items() if s >= schedule.first_trainable for x in own]
        undecided = sum(x.gradient_bytes + x.rollback_bytes for x in trained)
    # reduction: bytes of the reduction of the stages that have had all their W's.
    reduction, live, most, group_size = 0, undecided, undecided, m // accumulation_groups
    for done, (kind, s, j) in enumerate(schedule.ops[rank]):
        if done == pending:
            live -= undecided
        weighs, held = kind in (Kind.W, Kind.BW), freed[s, kind] * (s >= schedule.first_trainable)
        group, in_group = divmod(j, group_size)
        folded = _folded(group + 1, accumulation_groups) if weighs else 0
        # The first W of an accumulation group makes its gradients.
        made = gradients[s] if weighs and in_group == 0 else 0
        # A group of one microbatch is made and folded layer by layer: not all of its gradients are
        # live at one time.
        spared = made - largest[s] if folded and group_size == 1 else 0
        live += held * (kind is Kind.F) + made * (kind is Kind.W)
        if kind is not Kind.W:
            size, count = inboxes.get((s, kind is Kind.F), (0, 0))
            receives -= size * (m - 1 - j < count)
        workspace = workspaces[s, kind, kind is Kind.BW and made > 0]
        most = max(most, live + reduction + receives + workspace - spared)
        live += made * (kind is Kind.BW) - held * (kind is not Kind.F)
        if weighs and in_group + 1 == group_size:
            most = max(most, live - spared)
            live -= gradients[s] * folded
        if weighs and j == m - 1 and replicas > 1:
            reduction = max(reduction, reduction_bytes(stages[s]))
        most = max(most, live + reduction)
    return most


def _freed(layer: LayerCost, kind: Kind) -> int:
    """Bytes of a layer that an op frees at its end, or that F keeps from its start."""
    if kind is Kind.B:
        return layer.activation_bytes - layer.stash_bytes
    return layer.stash_bytes if kind is Kind.W else layer.activation_bytes


def _folded(group: int, accumulation_groups: int) -> int:
    """Count the gradients that are freed once the `group`-th accumulation group is summed.

    The groups are summed in a tree.
    """
    merged = (group & -group).bit_length() - 1
    return merged + (group.bit_count() - 1 if group == accumulation_groups else 0)


def _workspace(layers: Sequence[LayerCost], kind: Kind, fresh: bool) -> int:
    """Bound the bytes that an op of a stage needs beside its live memory.

    In F the layers above hold nothing yet. In B they hold no more than W needs, in W nothing more.
    """
    most = above = 0
    for layer in reversed(layers):
        above -= layer.gradient_bytes * fresh
        needed = layer.workspace_bytes
        # A layer that was frozen later keeps nothing and makes no graph. Shapes do not tell the
        # bytes of that case.
        if kind is Kind.F and layer.activation_bytes:
            needed = layer.forward_workspace_bytes
        elif kind is Kind.W:
            needed = layer.weight_workspace_bytes
        most = max(most, needed - above)
        above += _freed(layer, kind)
    return most


def static_bytes(
    layers: Sequence[LayerCost], counts: Sequence[int], stage_ranks: Sequence[int]
) -> tuple[int, ...]:
    """Sum the weights, gradients and optimizer state of the layers on each rank, in bytes."""
    held = [0] * (max(stage_ranks) + 1)
    for (start, stop), rank in zip(
        pairwise(accumulate(counts, initial=0)), stage_ranks, strict=True
    ):
        held[rank] += sum(x.static_bytes for x in layers[start:stop])
    return tuple(held)


Limit = int | tuple[int, ...] | None
"""Bytes of every rank, or of each rank in order. None means unlimited."""


def rank_limits(limit: Limit, ranks: int) -> tuple[int, ...] | None:
    """Returns the bytes of each rank. None means unlimited."""
    if limit is None or isinstance(limit, int):
        return None if limit is None else (limit,) * ranks
    if len(limit) != ranks:
        raise PartitionError(f"{len(limit)} memory limits for {ranks} ranks; give one per rank")
    return limit


def within(needs: Sequence[int], limit: Limit) -> bool:
    """Returns whether each rank has the bytes that it needs."""
    limits = rank_limits(limit, len(needs))
    return limits is None or all(need <= most for need, most in zip(needs, limits, strict=True))


def least_limit(limit: Limit) -> int | None:
    """Returns the bytes that every rank has. None means unlimited."""
    return min(limit) if isinstance(limit, tuple) else limit


@dataclass(frozen=True)
class MemoryLimits:
    """Memory limits of stages: the contiguous ranges of layers that fit each stage."""

    layers: tuple[LayerCost, ...]
    resident: tuple[Pairs, ...]
    limits: tuple[int, ...]

    def need(self, stage: int, start: int, stop: int) -> int:
        """Compute the bytes of `stage` if it held the layers start..stop-1."""
        return max(sums[stop] - sums[start] for sums in self._sums[stage])

    def fits(self, stage: int, start: int, stop: int) -> bool:
        return self.need(stage, start, stop) <= self.limits[stage]

    @cached_property
    def _sums(self) -> list[list[list[int]]]:
        """Prefix sums of the bytes of layers, per stage and per pair."""

        def sums(forward: int, stashed: int) -> list[int]:
            held = (
                x.static_bytes + forward * x.activation_bytes + stashed * x.stash_bytes
                for x in self.layers
            )
            return [*accumulate(held, initial=0)]

        return [[sums(*pair) for pair in pairs or ((0, 0),)] for pairs in self.resident]
