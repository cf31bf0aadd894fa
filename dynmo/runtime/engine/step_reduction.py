"""The table that the ranks share at a step's end, and the result read from it.

The result is the same on every rank.

    replica 0   squared norms | losses, counts  | seconds of F, B and W, span, flag, hashes, memory,
    replica 1   of the layers | of microbatches | work of each rank of the pipeline, or slice
    ...

Exactly one rank writes each entry of a row. The sum over a pipeline therefore only adds zeros and
cannot round. Then the replicas gather their rows. The norms are the same in all rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dynmo.errors import InputError
from dynmo.models.loss import joined
from dynmo.runtime.comm.clock import Clock
from dynmo.runtime.engine.batch_check import COMPARED, find_difference
from dynmo.runtime.engine.executor import SEND, WAIT, StepOutput
from dynmo.runtime.engine.not_finite import NotFinite
from dynmo.runtime.engine.peak_memory import peak_bytes
from dynmo.runtime.optim.optimizer import squared_norm
from dynmo.runtime.state.layer_store import LayerStore
from dynmo.schedule.op import Kind

# F, B, W, span, flag, what is compared, memory and work.
_ROWS = 7 + len(COMPARED)
_HASHES = slice(5, 5 + len(COMPARED))


@dataclass(frozen=True)
class Rollback:
    """A step that was not as some ranks had made it, and seconds thrown away."""

    what: str
    seconds: float


@dataclass(frozen=True)
class Switch:
    """A change that applies from the next step on. `on`: steps have no barrier."""

    on: bool
    reason: str


@dataclass(frozen=True)
class StepRecord:
    """Record of one step. It is the same on every rank.

    Attributes:
        loss: Mean loss over all counted targets.
        norm: Norm of all gradients before clipping.
        squared_norms: Squared norm of each layer's gradients before clipping. 0 if the step was
            skipped.
        busy: Seconds that each rank (or slice) computed, without time that other processes took.
        spans: Seconds from each rank's first op to its last.
        flags: What each rank passed as `flag`.
        step_output: The losses of this rank's microbatches, and when its ops ran.
        loss_scale: Factor of the loss in float16.
        rollback: With post-validation, why the step was taken back. None if it was not.
        switch: With post-validation, a change between steps with and without a barrier.
        skipped: Whether nothing was updated: gradients overflowed, and the loss scale falls. Or the
            step was not finite for another reason.
        not_finite: That reason. None after an overflow.
        counted: Number of targets that the loss counts. Without a counter, that of microbatches.
        memory: Peak bytes of each rank from `restart_peak` until its gradients were complete.
            Slices of a GPU have those of their process. 0 if unknown.
        work: Operations of the whole batch, as the caller counts them.
        kinds: The busy seconds of all ranks by F, B and W. A fused BW counts half and half.
        router_loss: What routers have added to the loss. None if there are none.
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
    not_finite: NotFinite | None = None
    counted: float = 0.0
    memory: tuple[int, ...] = ()
    work: float = 0.0
    kinds: tuple[float, float, float] = (0.0, 0.0, 0.0)
    router_loss: float | None = None

    @property
    def idle_ratio(self) -> float:
        """1 - mean over ranks of busy time / span."""
        span = max(self.spans)
        return 1 - sum(self.busy) / len(self.busy) / span if span else 0.0


class StepReduction:
    """The table as this rank fills it in and reads it. float64, [replicas, length]."""

    def __init__(self, store: LayerStore, clock: Clock) -> None:
        self._store, self.clock = store, clock

    @property
    def length(self) -> int:
        return self._losses_end + _ROWS * self._store.layout.ranks

    @property
    def _losses_end(self) -> int:
        return self._store.model.layers + self._sums * self._store.layout.microbatches

    @property
    def _sums(self) -> int:
        """Numbers of a microbatch: loss, count, and the loss of routers if there are some."""
        return 2 if self._store.model.router_loss is None else 3

    def _parts(self, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns norms [replicas, layers], losses and counts [sums, microbatches of all replicas],
        and [_ROWS, ranks of all replicas].

        The rows are F, B, W, span, flag, `COMPARED`, memory, and work.
        """
        layers, end, replicas = self._store.model.layers, self._losses_end, len(table)
        losses = table[:, layers:end].view(replicas, self._sums, -1)
        rest = table[:, end:].view(replicas, _ROWS, -1)
        return (
            table[:, :layers],
            losses.transpose(0, 1).flatten(1),
            rest.permute(1, 2, 0).flatten(1),
        )

    def entries(self, step_output: StepOutput, flag: int) -> Tensor:
        """Returns this rank's entries of its replica's row. Its gradients must be complete."""
        store, clock = self._store, self.clock
        layout, layers, end = store.layout, store.model.layers, self._losses_end
        row = torch.zeros(self.length, dtype=torch.float64)
        norms, losses = row[:layers], row[layers:end].view(self._sums, -1)
        rest = row[end:].view(_ROWS, -1)
        squares = store.replicas.squared_norms()
        if squares is None:
            squares = {
                index: squared_norm(share.parameter.grad for share in optimizer.shares.values())
                for index, optimizer in store.optimizers.items()
            }
        for index, value in squares.items():
            norms[index] = value
        if step_output.losses:
            losses[0] = torch.stack(step_output.losses)
            losses[1] = torch.tensor(step_output.counts, dtype=torch.float64)
            if step_output.router_losses:
                losses[2] = torch.stack(step_output.router_losses)
        memory = peak_bytes(store.world.device)
        for rank in {layout.stage_ranks[stage] for stage in store.own_stages}:
            spent = [s for s in step_output.intervals if layout.stage_ranks[s.stage] == rank]
            column = rest[:, rank]
            kinds: dict[str, float] = dict.fromkeys(Kind, 0.0)
            for s in spent:
                if s.kind not in (WAIT, SEND):
                    seconds = clock.seconds(s.start, s.end)
                    kinds[s.kind] += clock.elapsed(s.start, s.end) if seconds is None else seconds
            half = kinds[Kind.BW] / 2
            column[0] = kinds[Kind.F]
            column[1] = kinds[Kind.B] + half
            column[2] = kinds[Kind.W] + half
            column[3] = clock.elapsed(spent[0].start, spent[-1].end)
            column[4] = float(flag)
            for at, value in enumerate(step_output.hashes, 5):
                if value is not None:
                    column[at] = value
            column[-2] = memory
            if rank == layout.stage_ranks[0]:
                column[-1] = float(step_output.work)
        return row

    def wrong_batch(self, step: int, table: Tensor) -> InputError | None:
        """Returns the error of ranks with different batches, or of a batch that counts nothing."""
        _, losses, rest = self._parts(table)
        if not losses[1].any():
            return InputError(
                f"step {step}: no target of the whole batch is counted (all labels are -100?); "
                "nothing was updated"
            )
        hashes = rest[_HASHES].tolist()
        return find_difference(f"step {step}", hashes, self._store.layout.replicas)

    def shared(self, entries: Tensor, what: str) -> Tensor:
        """Returns the table. All ranks call it with their entries."""
        return self.complete(self._store.world.sum(entries, what))

    def complete(self, row: Tensor) -> Tensor:
        """Returns the table from this replica's row, which its ranks have completed."""
        return self._store.world.peers.gather(row, "the other replicas' steps to end")

    def read(
        self, step: int, table: Tensor, step_output: StepOutput, loss_scale: float
    ) -> StepRecord:
        norms, losses, rest = self._parts(table)
        squares = tuple(norms[0].tolist())
        *kinds, spans, flags = rest[: _HASHES.start].tolist()
        memory, work = rest[_HASHES.stop :].tolist()
        forward, backward, weights = map(math.fsum, kinds)
        norm = math.sqrt(math.fsum(squares)) if all(map(math.isfinite, squares)) else math.nan
        counts = losses[1].tolist()
        return StepRecord(
            step,
            joined(losses[0], counts, self._store.model.sums),
            norm,
            squares,
            tuple(map(math.fsum, zip(*kinds, strict=True))),
            tuple(spans),
            tuple(map(int, flags)),
            step_output,
            loss_scale,
            counted=math.fsum(counts),
            memory=tuple(map(int, memory)),
            work=math.fsum(work),
            kinds=(forward, backward, weights),
            router_loss=joined(losses[2], counts) if len(losses) > 2 else None,
        )
