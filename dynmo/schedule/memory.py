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

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

from dynmo.cost.layer_cost import LayerCost
from dynmo.errors import PartitionError
from dynmo.schedule.lowering import Compute, Verdict, fuse, lower
from dynmo.schedule.op import Kind, Op, Schedule

Pairs = Sequence[tuple[int, int]]


def stage_memory(
    layers: Sequence[LayerCost], counts: Sequence[int], resident: Sequence[Pairs]
) -> tuple[int, ...]:
    """Compute the bytes of each stage at its peak.

    `resident` is `simulator.resident` of the schedule.
    """
    if sum(counts) != len(layers):
        raise PartitionError(
            f"a placement of {sum(counts)} layers for {len(layers)} layer costs; its counts must "
            "sum to the layers"
        )
    if len(counts) != len(resident):
        raise PartitionError(
            f"a placement on {len(counts)} stages under a schedule of {len(resident)} stages; "
            "make both for the same ranks"
        )
    out: list[int] = []
    for own, pairs in zip(_stages(layers, counts), resident, strict=True):
        activation, stash = sum(x.activation_bytes for x in own), sum(x.stash_bytes for x in own)
        live = max((kept * activation + stashed * stash for kept, stashed in pairs), default=0)
        out.append(sum(x.static_bytes for x in own) + live)
    return tuple(out)


def _stages(layers: Sequence[LayerCost], counts: Sequence[int]) -> Iterator[Sequence[LayerCost]]:
    for start, stop in pairwise(accumulate(counts, initial=0)):
        yield layers[start:stop]


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
    gradients are cut into shares, joined and received.
    """
    return 3 * min(REDUCED_AT_ONCE, max((layer.gradient_bytes for layer in layers), default=0))


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


class _Inboxes:
    """The receives that a rank keeps posted for messages from other ranks."""

    def __init__(
        self, layers: Sequence[LayerCost], bounds: Sequence[int], schedule: Schedule, rank: int
    ) -> None:
        m, stage_ranks = schedule.microbatches, schedule.stage_ranks
        credits = schedule.ranks if schedule.credits is None else schedule.credits
        # Key: (stage, whether the message is a gradient). Value: bytes of a message, and how many
        # receives are kept posted.
        self._kept: dict[tuple[int, bool], tuple[int, int]] = {}
        for s in schedule.stages_of(rank):
            if s > 0 and stage_ranks[s - 1] != rank:
                size = layers[bounds[s] - 1].output_bytes
                depth = max(1, credits) if s - 1 < schedule.first_trainable else m
                self._kept[s, False] = size, posted(m, size, depth)
            above = s + 1 < schedule.stages and stage_ranks[s + 1] != rank
            if above and s >= schedule.first_trainable:
                size = layers[bounds[s + 1] - 1].output_bytes
                self._kept[s, True] = size, posted(m, size, m)
        self._left = dict.fromkeys(self._kept, m)  # messages still to be taken
        self.posted_bytes = sum(size * min(count, m) for size, count in self._kept.values())

    def take(self, op: Op) -> None:
        """Take the message that an op needs, and post the next receive."""
        inbox = op.stage, op.kind is not Kind.F
        if op.kind is not Kind.W and inbox in self._kept:
            size, count = self._kept[inbox]
            self._left[inbox] -= 1
            self.posted_bytes -= size * (self._left[inbox] < count)


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
    kept = {s: sum(x.activation_bytes for x in own) for s, own in stages.items()}
    gradients = {s: sum(x.gradient_bytes for x in own) for s, own in stages.items()}
    inboxes = _Inboxes(layers, bounds, schedule, rank)
    workspaces = {(s, kind): _workspace(own, kind) for s, own in stages.items() for kind in Kind}
    ends = {s: _change_at_end(own) for s, own in stages.items()}
    undecided = 0
    if pending is not None:
        undecided = sum(
            gradients[s] + sum(x.rollback_bytes for x in own)
            for s, own in stages.items()
            if s >= schedule.first_trainable
        )
    # reduction: bytes of the reduction of the stages that have had all their W's.
    weights_done, reduction = dict.fromkeys(stages, 0), 0
    live = most = undecided
    group_size = m // accumulation_groups
    for done, op in enumerate(schedule.ops[rank]):
        if done == pending:
            live -= undecided
        s, trains = op.stage, op.stage >= schedule.first_trainable
        if op.kind is Kind.F and trains:
            live += kept[s]
        weighs = op.kind is Kind.W or op.kind is Kind.BW
        group, in_group = divmod(weights_done[s], group_size)
        # The first W of an accumulation group makes its gradients.
        fresh = trains and weighs and in_group == 0
        folded = _folded(group + 1, accumulation_groups) if weighs else 0
        # A group of one microbatch is made and folded layer by layer: not all of its gradients are
        # live at one time.
        spared = 0
        if fresh and folded and group_size == 1:
            spared = gradients[s] - max(x.gradient_bytes for x in stages[s])
        if fresh and op.kind is Kind.W:
            live += gradients[s]
        inboxes.take(op)
        makes = fresh and op.kind is Kind.BW
        workspace = _workspace(stages[s], op.kind, fresh=True) if makes else workspaces[s, op.kind]
        most = max(most, live + reduction + inboxes.posted_bytes + workspace - spared)
        if trains:
            live += ends[s][op.kind] + (gradients[s] if makes else 0)
            weights_done[s] += weighs
            if weighs and in_group + 1 == group_size:
                most = max(most, live - spared)
                live -= gradients[s] * folded
            if replicas > 1 and weights_done[s] == m:
                reduction = max(reduction, reduction_bytes(stages[s]))
        most = max(most, live + reduction)
    return most


def _change_at_end(layers: Sequence[LayerCost]) -> dict[Kind, int]:
    """Change of a stage's live bytes at the end of an op of each kind.

    The activations that F keeps count from its start.
    """
    kept, stash = sum(x.activation_bytes for x in layers), sum(x.stash_bytes for x in layers)
    return {Kind.F: 0, Kind.B: stash - kept, Kind.W: -stash, Kind.BW: -kept}


def _folded(group: int, accumulation_groups: int) -> int:
    """Count the gradients that are freed once the `group`-th accumulation group is summed.

    The groups are summed in a tree.
    """
    merged = (group & -group).bit_length() - 1
    return merged + (group.bit_count() - 1 if group == accumulation_groups else 0)


def _workspace(layers: Sequence[LayerCost], kind: Kind, fresh: bool = False) -> int:
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
        above += {
            Kind.B: layer.activation_bytes - layer.stash_bytes,
            Kind.W: layer.stash_bytes,
        }.get(kind, layer.activation_bytes)
    return most


def static_bytes(
    layers: Sequence[LayerCost], counts: Sequence[int], stage_ranks: Sequence[int]
) -> tuple[int, ...]:
    """Sum the weights, gradients and optimizer state of the layers on each rank, in bytes."""
    held = [0] * (max(stage_ranks) + 1)
    for own, rank in zip(_stages(layers, counts), stage_ranks, strict=True):
        held[rank] += sum(x.static_bytes for x in own)
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
    """Memory limits of stages: the contiguous ranges of layers that fit each stage.

    Bytes are never negative, so a range that does not fit still does not fit with more layers. That
    makes exact search fast.
    """

    layers: tuple[LayerCost, ...]
    resident: tuple[Pairs, ...]
    limits: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.limits) != len(self.resident):
            raise PartitionError(
                f"{len(self.limits)} memory limits for {len(self.resident)} stages; give one "
                "limit per stage, in bytes"
            )
        for index, layer in enumerate(self.layers):
            if min(layer.static_bytes, layer.activation_bytes, layer.stash_bytes) < 0:
                raise PartitionError(
                    f"layer {index} has a negative number of bytes; sizes are at least 0"
                )

    @property
    def stages(self) -> int:
        return len(self.limits)

    def need(self, stage: int, start: int, stop: int) -> int:
        """Compute the bytes of `stage` if it held the layers start..stop-1."""
        return max(sums[stop] - sums[start] for sums in self._sums[stage])

    def fits(self, stage: int, start: int, stop: int) -> bool:
        return self.need(stage, start, stop) <= self.limits[stage]

    def reach(self, stage: int, start: int) -> int:
        """Find the largest stop for which the layers start..stop-1 fit `stage`.

        It is `start` itself if not even one layer fits.
        """
        limit = self.limits[stage]
        return max(
            start,
            min(bisect_right(sums, sums[start] + limit, start) - 1 for sums in self._sums[stage]),
        )

    @cached_property
    def _sums(self) -> tuple[tuple[list[int], ...], ...]:
        """Return prefix sums of the bytes of layers, per stage and per pair."""
        known: dict[tuple[int, int], list[int]] = {}
        for pair in {pair for pairs in self.resident for pair in pairs} | {(0, 0)}:
            forward, stashed = pair
            held = (
                x.static_bytes + forward * x.activation_bytes + stashed * x.stash_bytes
                for x in self.layers
            )
            known[pair] = list(accumulate(held, initial=0))
        return tuple(tuple(known[pair] for pair in pairs or ((0, 0),)) for pairs in self.resident)
