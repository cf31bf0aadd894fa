"""The programs that this rank runs: one trains, and others evaluate.

They are lowered when they are first needed, and again after layers have moved, frozen or changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dynmo.errors import ConfigError, RunError, notes, place
from dynmo.kernels.seeds import generators_kept
from dynmo.models.loss import counts_of
from dynmo.runtime.comm.channels import Transport
from dynmo.runtime.comm.clock import Clock
from dynmo.runtime.engine.batch_check import StepBatch, Targets, hashes_to_compare
from dynmo.runtime.engine.executor import Executor, StepOutput
from dynmo.runtime.engine.profiler import Profiler
from dynmo.runtime.engine.schedule_maker import ScheduleMaker
from dynmo.runtime.engine.stage_streams import StageStreams
from dynmo.runtime.layer.census import evaluated
from dynmo.runtime.layer.stage import PrefixRunner, Stage
from dynmo.runtime.state.layer_store import LayerStore
from dynmo.schedule.lowering import Program, fold, lower, lower_forward
from dynmo.schedule.op import Schedule

_EVALUATORS = 2


class Programs:
    def __init__(
        self,
        store: LayerStore,
        schedule_maker: ScheduleMaker,
        profiler: Profiler,
        clock: Clock,
        streams: StageStreams,
        *,
        post_validation: bool,
        replicates: bool,
    ) -> None:
        self._store, self._schedule_maker = store, schedule_maker
        self._profiler, self._clock, self._streams = profiler, clock, streams
        self._post_validation = post_validation
        self._replicates = replicates
        # Returns what runs F of the frozen leading layers of this rank. None if there is nothing.
        self.frozen_prefix: Callable[[Sequence[int]], PrefixRunner | None] = lambda _: None
        self._run_frozen: PrefixRunner | None = None
        self._training: Executor | None = None
        self._evaluators: dict[int, Executor] = {}

    def relower(self) -> None:
        """Drops programs and channels. They are made anew at the next step."""
        for executor in (self._training, *self._evaluators.values()):
            if executor is not None:
                executor.close()
        self._training = None
        self._evaluators.clear()

    def executor(self, schedule: Schedule | None = None) -> Executor:
        """Returns the executor of the training program.

        After a change the program is lowered again, and the ranks compare the schedule.
        """
        if self._training is None:
            store, maker = self._store, self._schedule_maker
            schedule = maker.agreed() if schedule is None else schedule
            schedule = fold(schedule) if store.layout.sliced else schedule
            self._training = self._execute(
                lower(schedule, self._post_validation, self._varying()),
                store.frozen.first_trainable,
                store.layout.microbatches,
            )
        return self._training

    def train(
        self,
        batch: StepBatch,
        draw: int,
        scale: float,
        is_validated: Callable[[Executor], bool] | None = None,
        *,
        measures: bool = True,
    ) -> StepOutput:
        """Runs the program that trains, until this rank's gradients are complete.

        These calls communicate, and all ranks make them together:

            executor            compares the schedule, after layers have changed
            _count              shares the number of counted targets, last stages among replicas
            _look_at_layers     shares which layers have other modes, if a case skips layers
            executor.run        sends activations and gradients from stage to stage, and begins to
                                sum the gradients of a layer over the replicas after its last W
            replicas.finish     waits for these sums

        Args:
            draw: Seeds what layers draw. It is the number of the step without skipped ones.
            measures: Whether the times of its ops count.
        """
        store, executor = self._store, self.executor()
        counts = self._count(executor, batch.targets)
        executor.scale_loss(scale)
        hashes = hashes_to_compare(store.world, batch)
        self._look_at_layers(between_steps=is_validated is None)
        self._profiler.begin(store.layers.values())
        with self._running():
            step_output = executor.run(draw, batch, is_validated=is_validated)
        step_output.work, step_output.hashes, step_output.counts = batch.work, hashes, counts
        for stage in executor.stages.values():
            step_output.router_losses += [x for _, x in sorted(stage.router_losses.items())]
        store.replicas.finish("the gradients of the step")
        self._clock.settle()
        if not measures:
            for layer in store.layers.values():
                layer.marks.clear()
            return step_output
        stages = {s: stage.layers for s, stage in executor.stages.items()}
        self._profiler.observe_stages(stages, step_output.intervals)
        if store.world.device.type == "cpu":  # no other process has a part of a GPU's time
            self._profiler.observe_ops(step_output.intervals)
        return step_output

    def evaluate(
        self,
        batch: StepBatch,
        microbatches: int,
        outputs: dict[int, object] | None = None,
        observe: Callable[[Any, Any], None] | None = None,
    ) -> Tensor:
        """Returns the loss of each of this replica's microbatches, and its counted targets.

        float64 [2, microbatches]. All are 0 on ranks without the last stage.
        """
        executor = self._evaluator(microbatches)
        counts = self._count(executor, batch.targets, shares=False)
        for stage in executor.stages.values():
            stage.collected, stage.observe = outputs, observe
        # A stage chooses for itself what keeps a graph. Here nothing does.
        modules = [layer.module for layer in self._store.layers.values()]
        with evaluated(modules), self._running(), torch.enable_grad():
            step_output = executor.run(0, batch, training=False)
        for stage in executor.stages.values():
            stage.collected = stage.observe = None
        for layer in self._store.layers.values():
            layer.marks.clear()
        table = torch.zeros(2, microbatches, dtype=torch.float64)
        if step_output.losses:
            table[0] = torch.stack(step_output.losses)
            table[1] = torch.tensor(counts or [1.0] * microbatches)
        return table

    def _count(self, executor: Executor, targets: Targets, shares: bool = True) -> list[float]:
        """Counts the targets of each microbatch, and weighs the losses by them.

        Returns:
            The counts. Empty on ranks without the last stage.
        """
        store = self._store
        stage = executor.stages.get(len(store.layout.stage_ranks) - 1)
        if stage is None:
            return []
        stage.counts = None if targets is None else counts_of(store.model.count, targets)
        if stage.counts is not None and store.model.sums:
            stage.counts_of_all = 1.0
        elif stage.counts is not None and shares:
            counted = torch.tensor(math.fsum(stage.counts), dtype=torch.float64)
            stage.counts_of_all = math.fsum(
                store.world.peers.gather(counted, "the number of counted targets").tolist()
            )
        return list(stage.counts or ())

    def _evaluator(self, microbatches: int) -> Executor:
        if microbatches not in self._evaluators:
            # The oldest goes. Each has channels and threads of its own.
            while len(self._evaluators) >= _EVALUATORS:
                self._evaluators.pop(next(iter(self._evaluators))).close()
            store = self._store
            programs = lower_forward(
                store.layout.processes, store.world.size, microbatches, self._varying()
            )
            self._evaluators[microbatches] = self._execute(
                programs, store.model.layers, microbatches
            )
        return self._evaluators[microbatches]

    def _look_at_layers(self, between_steps: bool) -> None:
        """Refuses what would not train, and forgets what was known of layers in other modes."""
        store = self._store
        changed = [index for index, layer in store.layers.items() if layer.look(between_steps)]
        if self._run_frozen is not None:
            # Who skips layers depends on those of earlier ranks, too.
            first = torch.tensor([-min(changed, default=store.model.layers)])
            first = -int(store.world.largest(first, "the modes of all layers to be compared"))
            store.on_change(range(first, store.model.layers))

    @contextmanager
    def _running(self) -> Generator[None]:
        """Rejects a forward that counts in a buffer if replicas are possible."""
        store = self._store
        self._replicates = self._replicates or store.world.replicas > 1
        layers = sorted(store.layers.items()) if self._replicates else []
        before = [layer.buffers.copies(persistent=True) for _, layer in layers]
        with generators_kept(store.world.device):
            try:
                yield
            except SystemExit as error:
                raise RunError(
                    f"{store.world.describe_rank(store.world.rank)}: a layer or the loss ends its "
                    f"process with status {error.code}{place(error)}{notes(error)}"
                ) from error
        for (index, layer), copies in zip(layers, before, strict=True):
            written = layer.buffers.written(copies)
            name = layer.buffers.first_of(written, persistent=True) or layer.writes.counts_in
            if name is not None:
                raise ConfigError(
                    f"layer {index} ({type(layer.module).__name__}): its forward writes to its "
                    f"buffer {name!r} (running statistics, say), of which every replica would "
                    "have its own; use parallel.replicas = 1 without [elastic] reshape, or a layer "
                    "that keeps none"
                )

    def _varying(self) -> list[int]:
        """Returns the boundaries behind layers that say that their outputs vary in shape."""
        modules, partition = self._store.modules, self._store.layout.partition
        return [
            stage
            for stage in range(partition.stages - 1)
            if getattr(modules[partition.range_of(stage).stop - 1], "varying_shapes", False)
        ]

    def _execute(
        self,
        programs: tuple[Program, ...],
        first: int,
        microbatches: int,
    ) -> Executor:
        store, world = self._store, self._store.world
        last = len(store.layout.stage_ranks) - 1
        frozen = store.frozen.first_trainable
        prefix = sorted(index for index in store.layers if index < frozen)
        self._run_frozen = self.frozen_prefix(prefix)
        stages: dict[int, Stage] = {}
        for stage in store.own_stages:
            layers = [store.layers[i] for i in store.layout.partition.range_of(stage)]
            weight = 1 / (microbatches * world.replicas)
            count = sum(layer.index < frozen for layer in layers)
            loss = store.model.loss if stage == last else None
            pieces = store.pieces if stage == last else None
            stages[stage] = Stage(
                layers, first, loss, weight, count, self._run_frozen, world.device, pieces
            )
            stages[stage].router_loss = store.model.router_loss
            stages[stage].is_double = store.is_double
        transport = Transport(world, programs)
        program = programs[world.rank]
        return Executor(program, stages, transport, self._clock, self._streams)
