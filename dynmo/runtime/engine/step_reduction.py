"""What the ranks know of a step at its end: one table, and the result that is read from it, the
same on every rank.

    squared norms of the layers | losses of the microbatches | busy, span, flag
    on all replicas               of all replicas              of every global rank, or slice

But for the norms each entry is filled by one rank, and of those by one in a pipeline: so no sum is
rounded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dynmo.runtime.comm.clock import Clock, seconds_or_elapsed
from dynmo.runtime.engine.executor import SEND, WAIT, StepOutput
from dynmo.runtime.engine.norm_ring import Rollback, Switch
from dynmo.runtime.optim.optimizer import squared_norm
from dynmo.runtime.state.layer_store import LayerStore


@dataclass(frozen=True)
class StepResult:
    """What one step did. It is the same on every rank.

    Attributes:
        step: Number of the step.
        loss: Mean loss over all microbatches.
        norm: Norm of all gradients before clipping.
        squared_norms: Of each layer's gradients before clipping. 0 if the step was skipped.
        busy: Seconds that each rank (or slice) computed, without time that other processes took.
        spans: Seconds from each rank's first op to its last.
        flags: What each rank passed as `flag`.
        step_output: The losses of this rank's microbatches, and when its ops ran.
        loss_scale: Factor of the loss in float16.
        rollback: With post-validation, why the step was taken back. None if it was not.
        switch: With post-validation, a change between steps with and without a barrier.
        skipped: Whether gradients overflowed. Nothing was updated then, and the loss scale falls.
    """

    step: int
    loss: float
    norm: float
    squared_norms: tuple[float, ...]
    busy: tuple[float, ...]
    spans: tuple[float, ...]
    flags: tuple[int, ...]
    step_output: StepOutput
    loss_scale: float = 1.0
    rollback: Rollback | None = None
    switch: Switch | None = None
    skipped: bool = False

    @property
    def idle_ratio(self) -> float:
        """1 - mean over ranks of busy time / span."""
        span = max(self.spans)
        return 1 - sum(self.busy) / len(self.busy) / span if span else 0.0


class StepReduction:
    """The table as this rank fills it in and reads it. float64, [length]; its parts follow the
    holding's mesh."""

    def __init__(self, layer_store: LayerStore, clock: Clock) -> None:
        self._layer_store, self._clock = layer_store, clock

    @property
    def length(self) -> int:
        return self._losses_end + 3 * self._ranks

    @property
    def _ranks(self) -> int:
        return self._layer_store.layout.ranks * self._layer_store.layout.replicas

    @property
    def _losses_end(self) -> int:
        layout = self._layer_store.layout
        return self._layer_store.model.layers + layout.microbatches * layout.replicas

    def _parts(self, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Norms, losses, and [3, ranks]: views."""
        layers, losses = self._layer_store.model.layers, self._losses_end
        return table[:layers], table[layers:losses], table[losses:].view(3, self._ranks)

    def own(self, step_output: StepOutput, flag: int) -> Tensor:
        """This rank's entries; its gradients must be complete."""
        layer_store, world, layout, clock = (
            self._layer_store,
            self._layer_store.world,
            self._layer_store.layout,
            self._clock,
        )
        own = layout.microbatches
        table = torch.zeros(self.length, dtype=torch.float64)
        norms, losses, rest = self._parts(table)
        squares = layer_store.replicas.squared_norms()
        if squares is None:
            squares = {
                index: squared_norm(p.grad for p in layer.module.parameters())
                for index, layer in layer_store.layers.items()
            }
        for index, value in squares.items():
            norms[index] = value
        if step_output.losses:
            losses[world.replica * own :][:own] = torch.stack(step_output.losses)
        for rank in {layout.placement[stage] for stage in layer_store.own_stages}:
            spent = [s for s in step_output.intervals if layout.placement[s.stage] == rank]
            column = rest[:, rank * layout.replicas + world.replica]
            column[0] = sum(
                seconds_or_elapsed(clock, s.start, s.end)
                for s in spent
                if s.kind not in (WAIT, SEND)
            )
            column[1] = clock.elapsed(spent[0].start, spent[-1].end)
            column[2] = float(flag)
        return table

    def once(self, table: Tensor) -> Tensor:
        """All replicas have the same norms, for their gradients are summed: one of them gives them
        to a sum over all."""
        if self._layer_store.world.replica:
            self._parts(table)[0].zero_()
        return table

    def complete(self, table: Tensor) -> Tensor:
        """The table has the entries of all of a pipeline's ranks, here: now those of the other
        replicas', before it goes back."""
        if self._layer_store.world.replicas == 1:
            return table
        return self._layer_store.world.peers.sum(
            self.once(table.clone()), "the other replicas' steps to end"
        )

    def read(
        self, step: int, table: Tensor, step_output: StepOutput, loss_scale: float
    ) -> StepResult:
        norms, losses, rest = self._parts(table)
        squares = tuple(norms.tolist())
        busy, spans, flags = rest.tolist()
        norm = math.sqrt(math.fsum(squares)) if all(map(math.isfinite, squares)) else math.nan
        loss = float(losses.clone().mean())
        flags = tuple(map(int, flags))
        return StepResult(
            step, loss, norm, squares, tuple(busy), tuple(spans), flags, step_output, loss_scale
        )
