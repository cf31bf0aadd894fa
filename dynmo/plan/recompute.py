"""Activation checkpointing, layer by layer.

A recomputed layer keeps only its input from F to B, and runs F once more at the start of its B.

                   b      live from F to B               live from B to W
    kept           b      activation_bytes               stash_bytes
    recomputed     b + f  the layer before's output      stash_bytes

A backward goes through a stage from its last layer to its first, so one layer's activations are
back at a time. At layer i, the layers behind it hold the bytes that W needs. The layers before it
hold the bytes that their own B will need:

    kept' of layers < i    +    activation_bytes of i    +    stash_bytes of layers > i

This may be more than the bytes that are live before or after the whole B. `recompute_memory`
counts it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from dynmo.cost.layer_cost import LayerCost
from dynmo.errors import NoRoomError, PartitionError
from dynmo.schedule.memory import reduction_bytes, static_bytes
from dynmo.schedule.op import Kind, Schedule


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
            kept = min(layer.activation_bytes, _input_bytes(layers, index))
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


def _input_bytes(layers: Sequence[LayerCost], index: int) -> int:
    return layers[max(0, index - 1)].output_bytes


def recompute_memory(
    layers: Sequence[LayerCost],
    chosen: Collection[int],
    counts: Sequence[int],
    schedule: Schedule,
    replicas: int = 1,
) -> tuple[int, ...]:
    """An upper bound of each rank's bytes, by which `choose_recomputed` chooses.

    It follows a backward layer by layer and counts gradients as always there. It leaves out
    messages that wait and other workspaces. `layers` have their costs without recomputing.
    """
    kept = with_recompute(layers, chosen)
    return tuple(rank.need(kept) for rank in _ranks(layers, counts, schedule, replicas))


def choose_recomputed(
    layers: Sequence[LayerCost],
    counts: Sequence[int],
    schedule: Schedule,
    limit: int | Sequence[int],
    replicas: int = 1,
) -> frozenset[int]:
    """Chooses the layers to recompute so that every rank fits its limit.

    A rank that is too full takes layers until it fits. The layer that saves the most bytes of the
    peak per second of F is taken first. Then layers that turn out not to be needed are given back,
    the most expensive first. No chosen layer could therefore be left out. Recomputing one more
    layer never needs more memory.

    Args:
        layers: Cost of each layer without recomputing.
        counts: Number of layers on each stage.
        schedule: The schedule that runs.
        limit: Bytes: one number, or one per rank.
        replicas: Number of pipelines that sum their gradients.

    Raises:
        NoRoomError: Not even recomputing everything fits. The message says by how much.
    """
    limits = (limit,) * schedule.ranks if isinstance(limit, int) else tuple(limit)
    if len(limits) != schedule.ranks:
        raise PartitionError(
            f"{len(limits)} memory limits for {schedule.ranks} ranks; "
            "give one per rank, or one number for all"
        )
    every = with_recompute(layers, range(len(layers)))
    chosen: set[int] = set()
    for rank, (holder, most) in enumerate(
        zip(_ranks(layers, counts, schedule, replicas), limits, strict=True)
    ):
        least = holder.need(every)
        if least > most:
            raise NoRoomError(
                f"rank {rank} needs {least} bytes under {schedule.name} even when all its layers "
                f"are recomputed, {least - most} over the "
                f"limit of {most}; use more ranks, smaller microbatches, or a schedule that "
                "keeps fewer in flight"
            )
        chosen |= holder.choose_recomputed(most)
    return frozenset(chosen)


def _ranks(
    layers: Sequence[LayerCost], counts: Sequence[int], schedule: Schedule, replicas: int
) -> tuple[_Rank, ...]:
    if (sum(counts), len(counts)) != (len(layers), schedule.stages):
        raise PartitionError(
            f"a placement of {sum(counts)} layers on {len(counts)} stages, for {len(layers)} "
            f"layers under a schedule of {schedule.stages}"
        )
    bounds = tuple(accumulate(counts, initial=0))
    held = static_bytes(layers, counts, schedule.stage_ranks)
    out: list[_Rank] = []
    for rank, static in enumerate(held):
        stages = {
            s: range(bounds[s], bounds[s + 1])
            for s in schedule.stages_of(rank)
            if s >= schedule.first_trainable
        }
        summed = tuple(
            reduction_bytes(layers[own.start : own.stop]) if replicas > 1 else 0
            for own in stages.values()
        )
        out.append(
            _Rank(
                tuple(layers),
                stages,
                static,
                frozenset(_moments(schedule, rank, tuple(stages), summed)),
            )
        )
    return tuple(out)


_Moment = tuple[tuple[int, ...], tuple[int, ...], int, bool, int]
"""The live data of a rank at one time:

the microbatches between F and B of each own stage, those between B and W, the own stage that runs a
B now (-1: none), whether it runs W at once, and the bytes of reductions over the replicas."""


def _moments(
    schedule: Schedule, rank: int, stages: tuple[int, ...], summed: Sequence[int]
) -> Iterator[_Moment]:
    """Yields the live data of a rank during each B and after each op."""
    forward = [0] * len(stages)
    stashed = [0] * len(stages)
    left = [schedule.microbatches] * len(stages)
    reduction = 0
    for op in schedule.ops[rank]:
        if op.stage not in stages:
            continue
        own = stages.index(op.stage)
        if op.kind in (Kind.B, Kind.BW):
            yield tuple(forward), tuple(stashed), own, op.kind is Kind.BW, reduction
        left[own] -= op.kind in (Kind.W, Kind.BW)
        if not left[own]:
            reduction = max(reduction, summed[own])
        forward[own] += (op.kind is Kind.F) - (op.kind in (Kind.B, Kind.BW))
        stashed[own] += (op.kind is Kind.B) - (op.kind is Kind.W)
        yield tuple(forward), tuple(stashed), -1, False, reduction


@dataclass(frozen=True)
class _Rank:
    """One rank's stages that train, and everything that is live on it at a time."""

    layers: tuple[LayerCost, ...]
    stages: dict[int, range]
    static: int
    moments: frozenset[_Moment]

    def need(self, kept: Sequence[LayerCost]) -> int:
        """Bytes at the peak if the layers keep the bytes in `kept`."""
        own = list(self.stages.values())
        activation = [sum(kept[i].activation_bytes for i in stage) for stage in own]
        stash = [sum(kept[i].stash_bytes for i in stage) for stage in own]
        more = [
            {fused: self._within(kept, stage, fused) for fused in (False, True)} for stage in own
        ]
        peak = 0
        for forward, stashed, running, fused, reduction in self.moments:
            live = sum(n * x for n, x in zip(forward, activation, strict=True)) + sum(
                n * x for n, x in zip(stashed, stash, strict=True)
            )
            peak = max(peak, live + reduction + (more[running][fused] if running >= 0 else 0))
        return self.static + peak

    def _within(self, kept: Sequence[LayerCost], stage: range, fused: bool) -> int:
        """The most bytes that a B adds in the stage, to those live before it."""
        behind = most = 0
        for index in reversed(stage):
            most = max(
                most, behind + self.layers[index].activation_bytes - kept[index].activation_bytes
            )
            behind += (0 if fused else kept[index].stash_bytes) - kept[index].activation_bytes
        return most

    def choose_recomputed(self, limit: int) -> set[int]:
        chosen: set[int] = set()
        kept = list(self.layers)
        every = with_recompute(self.layers, [i for stage in self.stages.values() for i in stage])
        left = {
            i
            for stage in self.stages.values()
            for i in stage
            if every[i].activation_bytes < self.layers[i].activation_bytes
        }
        need = self.need(kept)
        while need > limit:
            ranked: list[tuple[float, float, int]] = []
            for index in sorted(left):
                kept[index] = every[index]
                saved = need - self.need(kept)
                own = self.layers[index].activation_bytes - every[index].activation_bytes
                kept[index] = self.layers[index]
                seconds = self.layers[index].f or 1e-30
                # If two moments are as full, one layer alone may save nothing. The bytes that it
                # keeps count then.
                ranked.append((saved / seconds, own / seconds, -index))
            best = -max(ranked)[2]
            chosen.add(best)
            left.discard(best)
            kept[best] = every[best]
            need = self.need(kept)
        for index in sorted(chosen, key=lambda i: (-self.layers[i].f, i)):
            kept[index] = self.layers[index]
            if self.need(kept) <= limit:
                chosen.discard(index)
            else:
                kept[index] = every[index]
        return chosen
