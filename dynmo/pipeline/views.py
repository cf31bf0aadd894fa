"""What a pipeline tells of itself: its ranks and layers, its measurements, its cases."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from dynmo.cost.layer_cost import LayerCost
from dynmo.events import Event
from dynmo.models.identity import Identity
from dynmo.models.model import Model
from dynmo.pipeline.case import TokenShares
from dynmo.pipeline.changes import Changes
from dynmo.pipeline.journal import surviving
from dynmo.pipeline.parts import Parts
from dynmo.plan.partition import Partition
from dynmo.runtime.comm.agreement import agree, maxima
from dynmo.runtime.comm.rank_group import RankGroup
from dynmo.runtime.engine.engine import Engine
from dynmo.runtime.state.layer_store import LayerStore
from dynmo.schedule.op import Schedule

if TYPE_CHECKING:
    from dynmo.cost.costs_file import Profile
    from dynmo.plan.decide import DecisionRecord


T = TypeVar("T")


class _View:
    """Reads the present parts of a pipeline, also after a load or a join."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    @property
    def _engine(self) -> Engine:
        return self._parts.engine

    @property
    def _changes(self) -> Changes:
        return self._parts.changes


class MeshView(_View):
    """The ranks of a pipeline, and where its layers are. A decision may change all of it."""

    @property
    def model(self) -> Model:
        """The model that is trained."""
        return self._engine.model

    @property
    def shape(self) -> tuple[int, int]:
        """Ranks (or slices) of a pipeline, and number of replicas."""
        return self._engine.store.layout.shape

    @property
    def replica(self) -> int:
        """Number of this rank's replica."""
        return self.world.replica

    @property
    def world(self) -> RankGroup:
        """The ranks of this rank's replica. `world.everyone` are those of all replicas."""
        return self._engine.store.world

    @property
    def microbatches(self) -> int:
        """Microbatches of a step on each replica."""
        return self._parts.steps.microbatches

    @property
    def ends(self) -> tuple[int, int]:
        """Ranks (or slices) of a pipeline that hold the first and the last stage."""
        stage_ranks = self._engine.store.layout.stage_ranks
        return stage_ranks[0], stage_ranks[-1]

    @property
    def partition(self) -> Partition:
        """Number of layers on each stage."""
        return self._engine.store.layout.partition

    @property
    def schedule(self) -> Schedule:
        """The schedule of the next step."""
        return self._engine.schedule_maker.on(self.partition)

    @property
    def modules(self) -> Mapping[int, nn.Module]:
        """The layers that this rank holds, by their index in the model."""
        return {index: layer.module for index, layer in self._engine.store.layers.items()}

    @property
    def store(self) -> LayerStore:
        """The layers of this rank with their optimizers, after the last step is final."""
        return self._engine.pending.final

    @property
    def identity(self) -> Identity:
        """What decides the numbers of the training: versions, code, layers."""
        return self._parts.identity

    @property
    def grown(self) -> int:
        """Generation in which ranks have joined last. 0 if none has since the last fault."""
        elastic = self._changes.elastic
        return 0 if elastic is None else elastic.grown

    def compared(self, digest: bytes | None, lengths: Sequence[int]) -> list[int]:
        """Returns the lengths of data after all ranks have compared theirs.

        Args:
            digest: That of the data. None if this rank reads none.
            lengths: Of each part of it. 0 if this rank reads none.

        Raises:
            RunError: Ranks read different data.
        """

        def compare() -> list[int]:
            agree(self.world, digest, "the data (data.source)")
            return [int(length) for length in maxima(self.world, lengths)]

        return self.together(compare)

    @surviving
    def together(self, run: Callable[[], T]) -> T:
        """Runs what all ranks do together and what changes nothing here. A fault repeats it."""
        return run()


@dataclass(frozen=True)
class Account:
    """The time that a pipeline has spent on changes so far, and the work that it has saved.

    Attributes:
        measure_seconds: Seconds that measuring took on this rank.
        decide_seconds: Seconds that decisions took on this rank.
        move_seconds: Seconds that moves took on this rank.
        spared_forwards: F's of single frozen layers that a case has skipped, on all ranks.
        gpu_seconds_returned: GPU-seconds of ranks that the run did without.
    """

    measure_seconds: float
    decide_seconds: float
    move_seconds: float
    spared_forwards: int
    gpu_seconds_returned: float


class Measured(_View):
    """What a pipeline has measured, and what it has decided from that."""

    @property
    def loss(self) -> float:
        """Loss of the last final step that was finite. NaN before the first."""
        return self._changes.loss

    @property
    def skipped(self) -> int:
        """Number of final steps that were skipped because they were not finite."""
        return self._engine.optimizer_step.not_finite.count

    @property
    def decisions(self) -> tuple[DecisionRecord, ...]:
        """What `adapt` decided last, each with the measurements that it rests on.

        `DecisionRecord.to_text` is a line for a file that `dynmo simulate` reads.
        """
        return tuple(self._changes.rebalancer.records)

    @surviving
    def costs(self) -> tuple[LayerCost, ...]:
        """Returns the measured cost of every layer: seconds per microbatch, and bytes."""
        from dynmo.pipeline.gathering import measured_costs

        return measured_costs(self._engine, self._parts.shapes)

    def forget(self) -> None:
        """Drops all measurements. The next step measures anew."""
        self._engine.profiler.forget(range(self._engine.model.layers))

    @surviving
    def profile(
        self, steps: int | None = None, costs: Sequence[LayerCost] | None = None
    ) -> Profile:
        """Returns the layers' costs as a costs file has them, for `dynmo plan` and `simulate`.

        Args:
            steps: Number of steps that the costs were measured over.
            costs: Cost of each layer. The default is `costs()`.
        """
        from dynmo.pipeline.gathering import measured_costs, profile_of
        from dynmo.pipeline.shape_costs import shapes_of

        engine, options = self._engine, self._changes.options
        measured = tuple(self.costs() if costs is None else costs)
        if self._parts.shapes is None:
            level = logging.INFO if engine.store.world.everyone.rank else logging.WARNING
            shapes = (
                None
                if options.micro_batch is None
                else shapes_of(options, engine.model, level=level)
            )
            measured = measured_costs(engine, shapes, measured)
        return profile_of(options, engine, measured, steps)

    @surviving
    def account(self) -> Account:
        """Returns what changes have cost and saved so far. All ranks call it together."""
        engine, changes = self._engine, self._changes
        overhead, everyone = changes.rebalancer.overhead, engine.store.world.everyone
        skipped = torch.tensor(changes.cases.skipped)
        return Account(
            engine.profiler.spent + overhead.measure,
            overhead.decide,
            overhead.move,
            int(everyone.sum(skipped, "what cases have skipped")),
            0.0 if changes.elastic is None else changes.elastic.gpu_seconds_returned,
        )

    def tell(self, event: Event) -> None:
        """Hands an event to those who listen (`dynmo.Log(listen=)`)."""
        self._parts.tell(event)

    @surviving
    def save_trace(self, path: str | Path | None) -> None:
        """Writes the recorded ops of all ranks, on rank 0. See `Pipeline(trace=)`.

        Open the file at ui.perfetto.dev. All ranks call it together.

        Args:
            path: The file. None writes nothing.
        """
        tracer = self._changes.tracer
        if tracer is not None:
            tracer.finish(None if path is None else Path(path), self._engine.costs)


class CaseView(_View):
    """What the dynamic cases of a pipeline tell."""

    @property
    def token_shares(self) -> Mapping[str, TokenShares]:
        """The last counts of each case by its name, such as the load of experts.

        Cases count at the start of the next step.
        """
        return self._changes.token_shares

    @property
    def wants_samples(self) -> bool:
        """Whether a case asks for the samples of each microbatch (`step(samples=...)`)."""
        return any(case.wants_samples for case in self._changes.cases.all)

    @property
    def has_dense(self) -> bool:
        """Whether some case can be switched off for an evaluation (`evaluate(dense=True)`)."""
        return next(self._changes.cases.dense(), None) is not None
