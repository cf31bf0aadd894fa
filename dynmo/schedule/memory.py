"""What a stage holds: weights, gradients and optimizer state of its layers, and what the schedule
keeps alive between F, B and W.

    bytes(stage) = sum(static_bytes) + max over (n_f, n_s) of  n_f * sum(activation_bytes) + n_s * sum(stash_bytes)
    bytes(rank)  = sum over its layers of weights and optimizer state
                 + max over its ops of  live + gradients + receives + workspace + reduction

where gradients begin with a stage's first W of the step, receives are those posted for messages to
come, the workspace is the op's, and the reduction over replicas of a stage's gradients begins with
its last W. With post-validation the gradients of the step before are there, too, and copies to take
it back from, until the verdict on it: under the first forwards.

The pairs come from `simulator.resident`: n_f microbatches of the stage are between F and B, and n_s
between B and W, at one time. A frozen prefix keeps nothing: the caller gives its layers with
activation_bytes = stash_bytes = 0.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from dynmo.cost.layer_cost import LayerCost
from dynmo.errors import PartitionError
from dynmo.schedule.lowering import Compute, Verdict, fuse, lower
from dynmo.schedule.op import Kind, Schedule

Pairs = Sequence[tuple[int, int]]


def stage_memory(
    layers: Sequence[LayerCost], counts: Sequence[int], resident: Sequence[Pairs]
) -> tuple[int, ...]:
    """Bytes of each stage at its peak, for contiguous stages of `counts` layers; `resident` is
    `simulator.resident` of the schedule.

    Raises PartitionError when the counts are for another number of layers or of stages.
    """
    if sum(counts) != len(layers):
        raise PartitionError(
            f"a placement of {sum(counts)} layers for {len(layers)} layer costs; its counts must sum to the layers"
        )
    if len(counts) != len(resident):
        raise PartitionError(
            f"a placement on {len(counts)} stages under a schedule of {len(resident)} stages; make both for the same ranks"
        )
    out: list[int] = []
    start = 0
    for count, pairs in zip(counts, resident, strict=True):
        own = layers[start : start + count]
        start += count
        activation, stash = sum(x.activation_bytes for x in own), sum(x.stash_bytes for x in own)
        live = max(
            (forward * activation + stashed * stash for forward, stashed in pairs), default=0
        )
        out.append(sum(x.static_bytes for x in own) + live)
    return tuple(out)


def rank_memory(
    layers: Sequence[LayerCost],
    counts: Sequence[int],
    schedule: Schedule,
    *,
    post_validation: bool = False,
    replicas: int = 1,
    accumulation_groups: int = 1,
) -> tuple[int, ...]:
    """Bytes of each rank at its peak under `schedule`: what its stages hold anyway, and the most
    they keep alive together.

    post_validation: the step before is not final as a step begins. replicas: that sum their
    gradients, each in so many accumulation groups.

    Raises PartitionError when the counts are for another number of layers or of stages.
    """
    if (sum(counts), len(counts)) != (len(layers), schedule.stages):
        raise PartitionError(
            f"a placement of {sum(counts)} layers on {len(counts)} stages, for {len(layers)} layers under a schedule of {schedule.stages}"
        )
    fused = fuse(schedule)  # as it runs
    pending = _ops_before_verdict(schedule) if post_validation else (None,) * schedule.ranks
    peaks = (
        _peak(layers, counts, fused, rank, pending[rank], replicas, accumulation_groups)
        for rank in range(schedule.ranks)
    )
    return tuple(
        static + peak
        for static, peak in zip(
            static_bytes(bare(layers), counts, schedule.placement), peaks, strict=True
        )
    )


def bare(layers: Sequence[LayerCost]) -> list[LayerCost]:
    """The layers as they are between steps: weights and optimizer state."""
    return [
        replace(layer, gradient_bytes=0, rollback_bytes=0, pending_gradient_bytes=0)
        for layer in layers
    ]


# Receives are posted ahead of what is asked for: so many of a channel, or all of a step's where
# together they are small.
POSTED_AHEAD = 8
POSTED_SMALL = 16 << 20  # bytes


REDUCED_AT_ONCE = 32 << 20
"""Bytes of a layer's gradients whose sum over the replicas is on its way at one time."""


def reduction_bytes(layers: Sequence[LayerCost]) -> int:
    """What summing these layers' gradients over replicas takes at most, one layer after another:
    cut into shares, joined, received."""
    return 3 * min(REDUCED_AT_ONCE, max((layer.gradient_bytes for layer in layers), default=0))


def posted(messages: int, size: int, depth: int) -> int:
    """How many receives of a step's `messages` of `size` bytes a channel of this depth keeps
    posted."""
    return (
        messages
        if messages <= depth and messages * size <= POSTED_SMALL
        else min(POSTED_AHEAD, depth - 1)
    )


def _ops_before_verdict(schedule: Schedule) -> tuple[int, ...]:
    """Of each rank, how many ops it runs before it knows whether the step before stands."""
    out: list[int] = []
    for program in lower(schedule, post_validation=True):
        verdict = next(at for at, x in enumerate(program.instructions) if isinstance(x, Verdict))
        out.append(sum(isinstance(x, Compute) for x in program.instructions[:verdict]))
    return tuple(out)


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
    stash = {s: sum(x.stash_bytes for x in own) for s, own in stages.items()}
    # By (stage, whether it is the gradient): bytes of a message from elsewhere, how many receives
    # are kept posted, messages taken.
    inboxes: dict[tuple[int, bool], tuple[int, int]] = {}
    for s in stages:
        below, above = (
            s > 0 and schedule.placement[s - 1] != rank,
            s + 1 < schedule.stages and schedule.placement[s + 1] != rank,
        )
        if below:
            credits = schedule.ranks if schedule.credits is None else schedule.credits
            size = layers[bounds[s] - 1].output_bytes
            inboxes[s, False] = (
                size,
                posted(m, size, max(1, credits) if s - 1 < schedule.first_trainable else m),
            )
        if above and s >= schedule.first_trainable:
            size = layers[bounds[s + 1] - 1].output_bytes
            inboxes[s, True] = size, posted(m, size, m)
    left_of = dict.fromkeys(inboxes, m)  # messages still to be taken
    waiting = sum(size * min(count, m) for size, count in inboxes.values())
    workspaces = {(s, kind): _workspace(own, kind) for s, own in stages.items() for kind in Kind}
    # What an op's end changes; what F keeps is there from its start.
    ends = {
        s: {Kind.F: 0, Kind.B: stash[s] - kept[s], Kind.W: -stash[s], Kind.BW: -kept[s]}
        for s in stages
    }
    gradients = {s: sum(x.gradient_bytes for x in own) for s, own in stages.items()}
    undecided = 0
    if pending is not None:
        undecided = sum(
            gradients[s] + sum(x.rollback_bytes for x in own)
            for s, own in stages.items()
            if s >= schedule.first_trainable
        )
    # Of each stage, the W's still to come; and what the reduction takes of those that have had
    # theirs.
    left = dict.fromkeys(stages, m)
    reduction = 0
    live = most = undecided
    each = m // accumulation_groups
    for done, op in enumerate(schedule.ops[rank]):
        if done == pending:
            live -= undecided
        s, trains = op.stage, op.stage >= schedule.first_trainable
        if op.kind is Kind.F and trains:
            live += kept[s]
        weighs = op.kind is Kind.W or op.kind is Kind.BW
        fresh = (
            trains and weighs and (m - left[s]) % each == 0
        )  # a slot's first: its gradients are made
        folded = _folded((m - left[s]) // each + 1, accumulation_groups) if weighs else 0
        # A slot of one microbatch is made and folded layer by layer: not all of its gradients are
        # there at one time.
        spared = (
            gradients[s] - max(x.gradient_bytes for x in stages[s])
            if fresh and folded and each == 1
            else 0
        )
        if fresh and op.kind is Kind.W:
            live += gradients[s]
        inbox = (s, op.kind is not Kind.F)
        if inbox in inboxes and op.kind is not Kind.W:
            size, count = inboxes[inbox]
            left_of[inbox] -= 1
            waiting -= size * (left_of[inbox] < count)
        makes = fresh and op.kind is Kind.BW
        workspace = _workspace(stages[s], op.kind, fresh=True) if makes else workspaces[s, op.kind]
        most = max(most, live + reduction + waiting + workspace - spared)
        if trains:
            live += ends[s][op.kind]
            live += gradients[s] if fresh and op.kind is Kind.BW else 0
            left[s] -= weighs
            if weighs and (m - left[s]) % each == 0:
                most = max(most, live - spared)
                live -= gradients[s] * folded
            if replicas > 1 and not left[s]:
                reduction = max(reduction, reduction_bytes(stages[s]))
        most = max(most, live + reduction)
    return most


def _folded(group: int, accumulation_groups: int) -> int:
    """How many gradients fewer there are once the step's `group`-th accumulation group is in the
    tree."""
    merged = (group & -group).bit_length() - 1
    return merged + (group.bit_count() - 1 if group == accumulation_groups else 0)


def _workspace(layers: Sequence[LayerCost], kind: Kind, fresh: bool = False) -> int:
    """Bytes that an op of a stage needs at most, beside what is alive: in F those above hold
    nothing yet, in B no more than W needs, in W nothing more. fresh: gradients are made as it
    goes."""
    most = above = 0
    for layer in reversed(layers):
        above -= layer.gradient_bytes * fresh
        needed = layer.workspace_bytes
        if (
            kind is Kind.F and layer.activation_bytes
        ):  # with nothing to keep it makes no graph: shapes do not tell what that needs
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
    layers: Sequence[LayerCost], counts: Sequence[int], placement: Sequence[int]
) -> tuple[int, ...]:
    """Per rank, the weights, gradients and optimizer state of its stages' layers."""
    held = [0] * (max(placement) + 1)
    start = 0
    for count, rank in zip(counts, placement, strict=True):
        held[rank] += sum(x.static_bytes for x in layers[start : start + count])
        start += count
    return tuple(held)


@dataclass(frozen=True)
class MemoryLimits:
    """Which contiguous ranges of layers fit which stage: `limits` is in bytes, one per stage,
    `resident` as for `stage_memory`.

    Bytes are never negative, so a range that does not fit still does not fit with more layers: that
    is what makes exact search quick.
    """

    layers: tuple[LayerCost, ...]
    resident: tuple[Pairs, ...]
    limits: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.limits) != len(self.resident):
            raise PartitionError(
                f"{len(self.limits)} memory limits for {len(self.resident)} stages; give one limit per stage, in bytes"
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
        """Bytes of `stage` if it held the layers start..stop-1."""
        return max(sums[stop] - sums[start] for sums in self._sums[stage])

    def fits(self, stage: int, start: int, stop: int) -> bool:
        return self.need(stage, start, stop) <= self.limits[stage]

    def reach(self, stage: int, start: int) -> int:
        """The largest stop for which the layers start..stop-1 fit `stage`; `start` itself when not
        even one layer does."""
        limit = self.limits[stage]
        return max(
            start,
            min(bisect_right(sums, sums[start] + limit, start) - 1 for sums in self._sums[stage]),
        )

    @cached_property
    def _sums(self) -> tuple[tuple[list[int], ...], ...]:
        """Per stage and per pair, prefix sums over the layers of the bytes that the pair makes a
        layer hold."""
        known: dict[tuple[int, int], list[int]] = {}
        for pair in {pair for pairs in self.resident for pair in pairs} | {(0, 0)}:
            forward, stashed = pair
            held = (
                x.static_bytes + forward * x.activation_bytes + stashed * x.stash_bytes
                for x in self.layers
            )
            known[pair] = list(accumulate(held, initial=0))
        return tuple(tuple(known[pair] for pair in pairs or ((0, 0),)) for pairs in self.resident)
