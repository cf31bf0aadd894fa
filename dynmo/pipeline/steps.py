"""Trains step by step: changes come first, then the engine has the batch, then a result is told."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any
from weakref import proxy

import torch
from torch import Tensor

from dynmo.activity import ACTIVITY
from dynmo.events import FaultEvent, NotFiniteEvent, StepResult
from dynmo.models.flops import product_weights
from dynmo.pipeline.autosave import AutoSave
from dynmo.pipeline.batch import Batch, BatchCutter
from dynmo.pipeline.case import Signals
from dynmo.pipeline.changes import Changes
from dynmo.pipeline.journal import Part, Reread, Survivor
from dynmo.pipeline.optimizers import OptimizerHandle
from dynmo.pipeline.results import (
    STOP,
    Evaluation,
    Metrics,
    MetricSums,
    Started,
    device_peak_flops,
    events_beside,
    result_of,
    tokens_of,
)
from dynmo.pipeline.whole_model import join_outputs
from dynmo.runtime.comm.agreement import NotWritten
from dynmo.runtime.comm.meeting import meeting_of
from dynmo.runtime.comm.worker import said_while
from dynmo.runtime.engine.batch_check import StepBatch, StepSettings
from dynmo.runtime.engine.engine import Engine
from dynmo.runtime.engine.peak_memory import restart_peak
from dynmo.runtime.engine.step_reduction import StepRecord
from dynmo.runtime.optim.precision import PRECISIONS

_logger = logging.getLogger(__name__)

Targets = Tensor | list[Tensor] | None


class Steps:
    """The steps of an engine, from the one at which a training starts, resumes or is joined.

    Args:
        saves: Saves when it is time to.
        tell: Hands events to the listener.
        listens: Whether there is one.
        done: Number of steps that are done.
        recovery: Keeps copies for faults. None if that is not wanted.
    """

    def __init__(
        self,
        engine: Engine,
        changes: Changes,
        optimizer: OptimizerHandle,
        saves: AutoSave,
        tell: Callable[..., None],
        listens: bool,
        done: int,
        recovery: Survivor | None,
    ) -> None:
        self._recovery = recovery
        self._engine, self._changes, self._optimizer = engine, changes, optimizer
        self._saves, self._tell, self._listens, self._done = saves, tell, listens, done
        engine.before_end = partial(Steps._save_before_end, proxy(self))
        self._started: dict[int, Started] = {}  # steps without a result yet
        self._ready: list[StepResult] = []  # results that were not returned yet
        self._is_set_up = False  # a step is final
        self._begin = time.perf_counter()  # when the present step began
        model, options, device = engine.model, changes.options, engine.store.world.device
        # Floating-point operations of a token in a step. 0 if unknown.
        self._token_flops = 6 * (product_weights(model, model.build(())) or 0)
        self._peak_flops = options.peak_flops or device_peak_flops(device, options.precision)

    @property
    def done(self) -> int:
        """Number of steps that are done. A step whose error was raised is not."""
        failed = self._engine.pending.take_failed()
        if failed is not None:
            self._done = self._changes.made = failed
            self._started = {step: x for step, x in self._started.items() if step < failed}
        return self._done

    @property
    def microbatches(self) -> int:
        """Microbatches of a step on each replica."""
        return self._changes.options.all_microbatches // self._engine.store.world.replicas

    # -- training ----------------------------------------------------------------------------------

    def adapt(self) -> tuple[StepResult, ...]:
        """Changes what is to be changed before the next step."""
        self._engine.pending.raise_failure()
        step, changes = self.done, self._changes
        if changes.made == step:
            return ()
        # First what is under way, since newcomers know nothing of its flags.
        results = self.drain() if changes.are_due(step) else ()
        if self._saves.if_due(step):
            results += self.drain()
        if changes.elastic is not None and changes.elastic.acts(step):
            self._saves.complete()  # a rank that leaves has a part in it
            if self._recovery is not None:
                self._recovery.settle()
        with ACTIVITY.doing(f"makes the changes before step {step}"):
            changes.make(step)
        self._begin = time.perf_counter()
        return results

    def train(
        self,
        part: Part,
        stop: bool,
        adapt: bool,
        reread: Reread | None = None,
        rates: tuple[dict[str, Any], ...] | None = None,
    ) -> tuple[StepResult, ...]:
        """Trains on one batch. Returns the results that have become final.

        Args:
            reread: Not called: nothing is repeated without a `Recovery`.
            rates: Options of the optimizer's groups, if a step is repeated that had others.
        """
        inputs, targets, samples = part
        if not adapt:
            self._saves.if_due(self.done)
        before = self.adapt() if adapt else ()
        if self._changes.left:
            return before
        self._saves.watch(self.done)
        engine, changes, world = self._engine, self._changes, self._engine.store.world
        with (
            said_while(
                world.everyone.rank,
                f"trains step {self.done}" if self._is_set_up else "is in its first step",
                not self._is_set_up,
            ),
            changes.cases.dropping_samples(),
        ):
            engine.pending.raise_failure()
            step, batch, rates = self.done, None, rates or self.rates()
            if self._recovery is not None:
                self._recovery.before_training(step)
            restart_peak(world.device)
            if changes.made != step:
                self._begin = time.perf_counter()
            layout, frozen = engine.store.layout, engine.store.frozen.layers
            started = Started(float(rates[0].get("lr", 0.0)), layout, len(frozen))
            wish = 0 if changes.elastic is None else changes.elastic.step_flag()
            with engine.attempt(step if engine.pending.validates else None):
                changes.cases.take_samples(samples, self.microbatches)
                batch = self._cut(inputs, targets, self.microbatches)
                batch = batch._replace(work=self._token_flops * tokens_of(inputs))
                if not self._is_set_up:
                    # Loops compile as they make the first schedule. That is no training time.
                    engine.programs.executor()
                    self._begin = time.perf_counter()
            norm = changes.options.max_grad_norm
            flag = STOP * (stop or self._saves.stop) + self._saves.flag(step) + wish
            settings = StepSettings(step, rates, norm, flag)
            if batch is None:
                records = engine.pending.take_done()
            else:
                changes.rebalancer.begin_move()
                records = engine.train(batch, settings)
            self._started[step] = started
            started.seconds = time.perf_counter() - self._begin
            self._begin = time.perf_counter()
            self._done = step + 1
            self._ready += map(self._finish, records)
            changes.end_move(self._done)
        self._optimizer.step()  # for torch's schedulers; weights change in Engine.train
        self._saves.after_step(self.done)
        return before + self.take()

    def _save_before_end(self) -> None:
        """Saves before steps that are not finite end the training."""
        try:
            if not self._saves.if_due(self.done, at_end=True):
                self._saves.complete(raises=True)
        except NotWritten as error:
            self._tell(FaultEvent(self.done, str(error)))

    def drain(self) -> tuple[StepResult, ...]:
        """Waits until the last step is final. Returns the results that were not returned before."""
        self.settle()
        return self.take()

    def settle(self) -> None:
        """Waits until the last step is final. Its result is returned later."""
        start = time.perf_counter()
        records = self._engine.drain()
        if records:
            self._started[records[-1].step].seconds += time.perf_counter() - start
        self._ready += map(self._finish, records)

    def take(self) -> tuple[StepResult, ...]:
        """Returns the results that were not returned before."""
        results, self._ready = tuple(self._ready), []
        return results

    def _finish(self, record: StepRecord) -> StepResult:
        """Makes the result of a step that is final, and tells it."""
        engine, changes = self._engine, self._changes
        elastic = changes.elastic
        self._is_set_up = True
        meeting_of(engine.store.world).end_setup()
        step, started = record.step, self._started.pop(record.step)
        is_finite = record.not_finite is None
        if is_finite:
            changes.loss = record.loss
            self._tell(changes.rebalancer.observe(step, started.seconds, record.busy))
        if changes.tracer is not None:
            changes.tracer.observe(record, started.layout, engine.schedule_maker.links)
        result = result_of(
            record,
            started,
            engine,
            changes.options,
            self._peak_flops,
            0.0 if elastic is None else elastic.gpu_seconds_returned,
            self._listens,
        )
        beside = [*events_beside(record, engine.optimizer_step.scaler.scale)]
        self._tell(result, *beside)
        if not self._listens and engine.store.world.everyone.rank == 0:
            for event in beside:
                if isinstance(event, NotFiniteEvent):
                    _logger.warning(f"step {step}: {event.text}")
        self._saves.observe(record.flags, result.stop)
        if elastic is not None:
            elastic.take_flags(record.flags)
        # Last, so that the ranks agree on the step whatever a case raises.
        if is_finite:
            changes.cases.observe(Signals(step, record.loss, record.squared_norms, started.rate))
        return result

    def rates(self) -> tuple[dict[str, Any], ...]:
        """Returns the options of each group of parameters in the next step."""
        options = self._changes.options
        rule = options.learning_rate
        return self._optimizer.options(
            None if rule is None else partial(rule.at, self.done, options.end)
        )

    def _cut(self, batch: object, targets: object, count: int) -> StepBatch:
        store, model = self._engine.store, self._engine.model
        dtype = torch.float64 if store.is_double else PRECISIONS[self._changes.options.precision]
        cutter = BatchCutter(model, store.modules[0], dtype, store.world.device)
        return StepBatch(*cutter.cut(batch, targets, count))

    # -- evaluation --------------------------------------------------------------------------------

    def evaluate(
        self,
        inputs: Batch | None,
        targets: Targets,
        count: int,
        *,
        dense: bool,
        outputs: bool,
        shared: bool,
        samples: Sequence[Hashable] | None,
        metrics: Metrics | None,
    ) -> Evaluation:
        """Computes the mean loss of a batch that is cut into `count` microbatches."""
        self.settle()
        world, cases = self._engine.store.world, self._changes.cases
        with self._engine.attempt():
            batch = self._cut(inputs, targets, count)
            # Outputs that were kept are those of an evaluation that is not dense.
            cases.take_samples(None if dense else samples, count)
        collected = dict[int, object]() if outputs else None
        sums = None if metrics is None else MetricSums(metrics)
        with ExitStack() as off:
            off.enter_context(ACTIVITY.doing(f"evaluates after step {self.done}"))
            for context in cases.dense() if dense else ():
                off.enter_context(context)
            off.enter_context(cases.dropping_samples())
            loss = self._engine.evaluate(
                batch, count, shares=not shared, outputs=collected, observe=sums
            )
        result = Evaluation(loss)
        if sums is not None:
            result.metrics = sums.over(world, shares=not shared)
        if collected is not None:
            result.outputs = join_outputs(world, collected)
        return result
