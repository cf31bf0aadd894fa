"""Runs this rank's training program or its evaluating program over its layers."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

from torch import Tensor

from dynmo.errors import ConfigError
from dynmo.kernels.seeds import generators_kept
from dynmo.pipeline.schedule_keeper import ScheduleKeeper
from dynmo.runtime.comm.clock import Clock
from dynmo.runtime.engine.batch_check import hashes_to_compare
from dynmo.runtime.engine.executor import Executor, StepOutput
from dynmo.runtime.engine.profiler import Profiler
from dynmo.runtime.engine.programs import Programs
from dynmo.runtime.layer.output_cache import Keys
from dynmo.runtime.state.layer_store import LayerStore


class ProgramRunner:
    """Lowers the schedule when that is needed, and runs its program.

    Args:
        layer_store: Holds this rank's layers.
        schedule_keeper: Knows the schedule.
        programs: Hold the programs that are lowered already.
        profiler: Takes the interval of each op.
        clock: Gives the marks of the ops.
        partial_weights: Whether a part of a W may run while a message is late.
        replicates: Whether a reshape may make replicas later.
    """

    def __init__(
        self,
        layer_store: LayerStore,
        schedule_keeper: ScheduleKeeper,
        programs: Programs,
        profiler: Profiler,
        clock: Clock,
        *,
        partial_weights: bool,
        replicates: bool,
    ) -> None:
        self._layer_store, self._schedule_keeper, self._programs = (
            layer_store,
            schedule_keeper,
            programs,
        )
        self._profiler, self._clock = profiler, clock
        self._partial_weights, self._replicates = partial_weights, replicates

    def executor(self) -> Executor:
        """Returns the executor of the training program.

        After a change the program is lowered again, and the ranks compare the schedule.
        """
        return self._programs.training or self._programs.lower(
            self._schedule_keeper.agreed(),
            self._schedule_keeper.message_timeout if self._partial_weights else None,
        )

    def train(
        self,
        executor: Executor,
        step: int,
        inputs: Tensor | None,
        targets: Tensor | None,
        keys: Keys | None,
        scale: float,
        is_validated: Callable[[], bool] | None = None,
    ) -> StepOutput:
        """Runs the program that trains, until this rank's gradients are complete.

        Args:
            executor: From `executor`.
            step: Number of the step.
            inputs: [microbatches, ...] on the rank of the first stage.
            targets: [microbatches, ...] on the rank of the last stage.
            keys: Key of each microbatch, for the cache of outputs.
            scale: Scale of the loss.
            is_validated: As `Executor.run` takes it.

        Returns:
            The losses, and the interval of each op.
        """
        layer_store = self._layer_store
        for layer in layer_store.layers.values():
            layer.module.train()
        executor.scale_loss(scale)
        layer_store.outputs.begin(keys, training=True)
        hashes = hashes_to_compare(layer_store.world, inputs, targets)
        with generators_kept(layer_store.world.device), self._buffers_as_they_were():
            step_output = executor.run(step, inputs, targets, is_validated=is_validated)
        step_output.hashes = hashes
        layer_store.replicas.await_gradients()
        self._clock.settle()
        if layer_store.world.device.type == "cpu":  # no other process has a part of a GPU's time
            self._profiler.observe_ops(step_output.intervals)
        return step_output

    def evaluate(
        self,
        inputs: Tensor | None,
        targets: Tensor | None,
        microbatches: int,
        keys: Keys | None,
        outputs: dict[int, object] | None = None,
    ) -> float:
        """Runs the forward only.

        Args:
            inputs: As in `train`.
            targets: As in `train`.
            microbatches: Number of microbatches.
            keys: As in `train`.
            outputs: As in `Programs.evaluate`.

        Returns:
            The mean loss on the rank of the last stage, 0 elsewhere.
        """
        with generators_kept(self._layer_store.world.device), self._buffers_as_they_were():
            return self._programs.evaluate(inputs, targets, microbatches, keys, outputs)

    @contextmanager
    def _buffers_as_they_were(self) -> Generator[None]:
        """Rejects a forward within the context that writes to a persistent buffer.

        Checks only if there are or may be replicas.

        Raises:
            ConfigError: A forward has written to a persistent buffer.
        """
        self._replicates = self._replicates or self._layer_store.world.replicas > 1
        layers = sorted(self._layer_store.layers.items()) if self._replicates else []
        before = [layer.buffers.copies(persistent=True) for _, layer in layers]
        yield
        for (index, layer), copies in zip(layers, before, strict=True):
            name = layer.buffers.first_persistent(layer.buffers.written(copies))
            if name is not None:
                raise ConfigError(
                    f"layer {index} ({type(layer.module).__name__}): its forward writes to its "
                    f"buffer {name!r} (running statistics, say), of which every replica would "
                    "have its own; use parallel.replicas = 1 without [elastic] reshape, or a layer "
                    "that keeps none"
                )
