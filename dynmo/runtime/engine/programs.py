"""The programs that this rank runs over its current layers.

One of them trains. The others evaluated last, by their number of microbatches.

They are lowered when they are first needed, and again after layers have moved, frozen or changed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dynmo.runtime.comm.channels import Transport
from dynmo.runtime.comm.clock import Clock
from dynmo.runtime.engine.executor import Executor, mean_loss
from dynmo.runtime.engine.stage_streams import StageStreams
from dynmo.runtime.layer.output_cache import Keys
from dynmo.runtime.layer.stage import Stage
from dynmo.runtime.state.layer_store import LayerStore
from dynmo.schedule.fold import fold
from dynmo.schedule.lowering import Program, lower, lower_forward
from dynmo.schedule.op import Schedule

_EVALUATORS = 2


class Programs:
    """Lowers schedules to programs and keeps their executors.

    Args:
        layer_store: Layers of this rank.
        clock: Marks the ops.
        streams: Streams on which the stages compute.
        post_validation: Whether programs have a place for the verdict on the step before.
    """

    def __init__(
        self, layer_store: LayerStore, clock: Clock, streams: StageStreams, *, post_validation: bool
    ) -> None:
        self._layer_store, self._clock, self._streams = layer_store, clock, streams
        self._post_validation = post_validation
        self.training: Executor | None = None
        self._evaluators: dict[int, Executor] = {}

    def relower(self) -> None:
        """Drops programs and channels. They are made anew at the next step."""
        for executor in (self.training, *self._evaluators.values()):
            if executor is not None:
                executor.close()
        self.training = None
        self._evaluators.clear()

    def lower(self, schedule: Schedule, timeout: float | None) -> Executor:
        """Lowers a schedule to the program that trains.

        Args:
            schedule: Schedule of all ranks. The same on every rank.
            timeout: As in `Executor`.

        Returns:
            The executor of this rank's program.
        """
        schedule = fold(schedule) if self._layer_store.layout.sliced else schedule
        programs = lower(schedule, self._post_validation, self._varying())
        self.training = self._execute(
            programs,
            self._layer_store.frozen.first_trainable,
            self._layer_store.layout.microbatches,
            timeout,
        )
        return self.training

    def evaluate(
        self,
        inputs: Tensor | None,
        targets: Tensor | None,
        microbatches: int,
        keys: Keys | None = None,
        outputs: dict[int, object] | None = None,
    ) -> float:
        """Evaluates the mean loss.

        Args:
            inputs: [microbatches, ...] on the rank of the first stage.
            targets: [microbatches, ...] on the rank of the last stage.
            microbatches: Number of microbatches.
            keys: Key of each microbatch for the output cache, as in `Engine.step`.
            outputs: Takes the model's output of each microbatch on the rank of the last stage.

        Returns:
            The mean loss on the rank of the last stage, 0 elsewhere.
        """
        layer_store = self._layer_store
        if microbatches not in self._evaluators:
            # The oldest goes. Each has channels and threads of its own.
            while len(self._evaluators) >= _EVALUATORS:
                self._evaluators.pop(next(iter(self._evaluators))).close()
            programs = lower_forward(
                layer_store.layout.processes, layer_store.world.size, microbatches, self._varying()
            )
            self._evaluators[microbatches] = self._execute(
                programs, layer_store.model.layers, microbatches
            )
        for layer in layer_store.layers.values():
            layer.module.eval()
        layer_store.outputs.begin(keys, training=False)
        executor = self._evaluators[microbatches]
        for stage in executor.stages.values():
            stage.collected = outputs
        # A stage chooses for itself what keeps a graph. Here nothing does.
        with torch.enable_grad():
            step_output = executor.run(0, inputs, targets, training=False)
        for stage in executor.stages.values():
            stage.collected = None
        for layer in layer_store.layers.values():
            layer.marks.clear()
        return mean_loss(step_output.losses)

    def _varying(self) -> list[int]:
        """Returns the boundaries behind stages whose outputs vary in shape.

        The stage's last layer says so.
        """
        modules, partition = self._layer_store.modules, self._layer_store.layout.partition
        ends = [partition.range_of(stage).stop - 1 for stage in range(partition.ranks - 1)]
        return [
            boundary
            for boundary, end in enumerate(ends)
            if getattr(modules[end], "varying_shapes", False)
        ]

    def _execute(
        self,
        programs: tuple[Program, ...],
        first: int,
        microbatches: int,
        timeout: float | None = None,
    ) -> Executor:
        layer_store, world, last = (
            self._layer_store,
            self._layer_store.world,
            len(self._layer_store.layout.placement) - 1,
        )
        frozen, cache = (
            layer_store.frozen.first_trainable,
            layer_store.outputs if layer_store.outputs.limit else None,
        )
        layer_store.outputs.hold({i for i in layer_store.layers if i < frozen})
        stages: dict[int, Stage] = {}
        for stage in layer_store.own_stages:
            own = [layer_store.layers[i] for i in layer_store.layout.partition.range_of(stage)]
            share, kept = (
                1 / (microbatches * world.replicas),
                sum(layer.index < frozen for layer in own),
            )
            loss = layer_store.model.loss if stage == last else None
            stages[stage] = Stage(own, first, loss, share, cache, kept, world.device)
        return Executor(
            programs[world.rank],
            stages,
            Transport(world, programs),
            self._clock,
            self._streams,
            timeout,
        )
