"""The loop of a pipeline: change, step, observe. Every rank runs it alike."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dynmo.events import (
    ChangeEvent,
    Event,
    PostValidationEvent,
    RollbackEvent,
    SkippedEvent,
    StepEvent,
    TokensEvent,
)
from dynmo.pipeline.batch import Cut
from dynmo.pipeline.case import Signals, TokenShares
from dynmo.pipeline.cases import Cases
from dynmo.pipeline.options import PipelineOptions
from dynmo.pipeline.placing import first_partition
from dynmo.pipeline.rebalance import Rebalancer
from dynmo.pipeline.saving import state_of
from dynmo.pipeline.step_result import StepResult
from dynmo.plan.partition import Partition
from dynmo.runtime.comm.meeting import meeting_of
from dynmo.runtime.engine.engine import Engine
from dynmo.runtime.engine.peak_memory import restart_peak
from dynmo.runtime.engine.step_reduction import StepRecord
from dynmo.schedule.bounds import Objective

if TYPE_CHECKING:
    from dynmo.pipeline.elasticity import Elasticity
    from dynmo.pipeline.trace import Tracer

Listener = Callable[[Event], None]

# Bit of a step's flag: this rank wants to stop.
STOP = 1


@dataclass
class _Started:
    """A step as it began.

    Attributes:
        rate: Learning rate.
        layers: Number of layers on each stage.
        frozen: Number of frozen layers.
        seconds: Seconds of the step, without the part of its end that fell into the next step.
    """

    rate: float
    layers: tuple[int, ...]
    frozen: int
    seconds: float = 0.0


class Loop:
    """Runs the steps of a pipeline, and the changes between them.

    Attributes:
        options: Options of the pipeline as they are now.
        step: Number of steps that are done. A step whose error was raised is not.
        loss: Loss of the last step.
        listen: Called with every event.
        elastic: Changes the number of ranks. None if that is not wanted.
        tracer: Records the ops. None if that is not wanted.
        peak_flops: FLOP/s that a rank's device can do. None if unknown.
        is_set_up: Whether a step of this loop is final.
        token_shares: What each case has counted last, by its name.
    """

    def __init__(
        self,
        options: PipelineOptions,
        engine: Engine,
        cases: Cases,
        rebalancer: Rebalancer,
        listen: Listener | None,
        *,
        step: int = 0,
        loss: float = math.nan,
        joined: bool = False,
    ) -> None:
        self.options, self._engine, self.cases = options, engine, cases
        self.rebalancer, self.listen = rebalancer, listen
        self._step, self.loss = step, loss
        self.elastic: Elasticity | None = None
        self.tracer: Tracer | None = None
        # Returns what schedulers change of the optimizer's groups.
        self.groups: Callable[[], list[dict[str, Any]]] = list
        self.peak_flops: float | None = None
        self.token_shares: dict[str, TokenShares] = {}
        # A newcomer takes part from the cases' own part of its first step on.
        self._joins_at = step if joined else None
        self._adapted: int | None = None  # the step before which changes were made
        self._placed: int | None = None  # and before which ranks and layers were
        self._started: dict[int, _Started] = {}  # steps without a result yet
        self._ready: list[StepResult] = []  # results that were not returned yet
        self._begin = time.perf_counter()
        self._barrier_stays = False  # although the options ask for none
        self.is_set_up = False
        engine.pending.take_failed()  # a loop before this one may have left it
        self.tell_barrier()

    def emit(self, *events: Event | None) -> None:
        for event in events:
            if event is not None and self.listen is not None:
                self.listen(event)

    @property
    def step(self) -> int:
        failed = self._engine.pending.take_failed()
        if failed is not None:
            self._step = self._adapted = failed
            self._started = {at: each for at, each in self._started.items() if at < failed}
        return self._step

    @property
    def left(self) -> bool:
        return self.elastic is not None and self.elastic.left

    # -- changes -----------------------------------------------------------------------------------

    def adapt(self) -> tuple[StepResult, ...]:
        """Changes ranks, mesh and placement, and lets the cases act, before the next step."""
        self._engine.pending.raise_failure()
        step = self.step
        if self._adapted == step:
            return ()
        results = self.drain() if self._must_drain(step) else ()
        if self._placed != step:
            self.rebalancer.records.clear()
            if step != self._joins_at:
                self._collect(step)
                if self.elastic is not None:
                    self._resize(self.elastic, step)
                    if self.left:
                        self._adapted = step
                        return results
            self._reshape(step)
            if self.rebalancer.is_due(step):
                self.consider()
            self._placed = step
        self._act(step)
        self._adapted = step
        self._begin = time.perf_counter()
        return results

    def _collect(self, step: int) -> None:
        with self._all_cases(step):
            for case, shares in self.cases.collect(step):
                self.token_shares[case.name] = shares
                self.emit(TokensEvent(step, case.name, shares.layers, shares.shares))

    def _act(self, step: int) -> None:
        with self._all_cases(step):
            for case, change in self.cases.act(step):
                self.emit(self.rebalancer.on_workload_change(step))
                self._keep_trace()
                own = case.name not in {each.name for each in self.options.cases}
                options = {} if own else change.options
                self.emit(ChangeEvent(step, case.name, change.layers, change.what, options))

    @contextmanager
    def _all_cases(self, step: int) -> Generator[None]:
        """Has all ranks raise the error of a case on one of them. The next call tries it again."""
        with self._engine.attempt():
            yield
            if any(case.acts(step) for case in self.cases.all):
                self.cases.follow_rebuilt()

    def _must_drain(self, step: int) -> bool:
        """Returns True if something may change or read the model before this step."""
        return (
            self.rebalancer.should_check(step)
            or (self.elastic is not None and self.elastic.acts(step))
            or any(case.acts(step) for case in self.cases.all)
        )

    def consider(self) -> None:
        for event in self.rebalancer.consider(self.step):
            self.emit(event)
            self._keep_trace()

    def _resize(self, elastic: Elasticity, step: int) -> None:
        def state() -> dict[str, Any]:
            return state_of(
                self._engine,
                self.cases.all,
                loss=self.loss,
                moves=self.rebalancer.moves + 1,
                extra={"groups": self.groups()},
            )

        size = self._engine.store.world.everyone.size
        if elastic.change(step, state) and not elastic.left:
            self.options = elastic.options
            if self.tracer is not None and self._engine.store.world.everyone.size > size:
                self.tracer.renew()
            self._keep_trace()
            self.tell_barrier()
        self.emit(*elastic.take_events(step))

    def _reshape(self, step: int) -> None:
        """Makes the same ranks another mesh, if that is decided or planned."""
        engine, options = self._engine, self.options
        shape, wanted = options.shape_at(step), None
        if options.elastic.reshape:
            wanted = self.rebalancer.mesh(step) if self.rebalancer.is_due(step) else None
        elif (
            options.elastic.reshape_at
            and shape != engine.store.layout.shape
            and shape[0] * shape[1] == engine.store.world.everyone.size
        ):
            wanted = (*shape, first_partition(options, engine.model.layers, shape[0]))
        if wanted is not None:
            self.reshape(*wanted)

    def reshape(self, pipeline: int, replicas: int, partition: Partition) -> None:
        before = self._engine.store.layout.shape
        self.emit(*self.rebalancer.reshape(self.step, pipeline, replicas, partition))
        if self._engine.store.layout.shape != before:
            self._keep_trace()
            self.tell_barrier()

    def _keep_trace(self) -> None:
        if self.tracer is not None:
            self.tracer.keep_around()

    def tell_barrier(self) -> None:
        """Reports if post-validation is not possible although the options ask for it.

        A weight tied over two ranks gets its gradient from both, so the barrier stays. A mesh that
        has the weight on one rank needs no barrier.
        """
        stays = (
            self.options.post_validation
            and self._engine.schedule_keeper.objective is Objective.MAKESPAN
        )
        if stays != self._barrier_stays:
            self._barrier_stays = stays
            reason = f"the layers of a tied weight are on {'two ranks' if stays else 'one rank'}"
            self.emit(PostValidationEvent(self.step, not stays, reason))

    # -- steps -------------------------------------------------------------------------------------

    def advance(
        self,
        cut: Callable[[], tuple[Cut, Cut, Tensor | float]],
        rates: Sequence[Mapping[str, Any]],
        stop: bool,
    ) -> tuple[StepResult, ...]:
        """Trains on the microbatches of one step. `cut` makes them, with their model FLOPs."""
        engine = self._engine
        engine.pending.raise_failure()
        step, given = self.step, None
        restart_peak(engine.store.world.device)
        if self._adapted != step:
            self._begin = time.perf_counter()
        started = _Started(
            float(rates[0].get("lr", 0.0)),
            engine.store.layout.partition.counts,
            len(engine.store.frozen.layers),
        )
        flag = STOP * stop + (0 if self.elastic is None else self.elastic.call())
        with engine.attempt(step if engine.pending.validates else None):
            given = cut()
            if not self.is_set_up:
                # Loops compile as they make the first schedule. That is no training time.
                engine.programs.executor()
                self._begin = time.perf_counter()
        records = engine.pending.take_done()
        if given is not None:
            inputs, targets, work = given
            records += engine.advance(
                step,
                inputs,
                targets,
                lr=rates,
                max_norm=self.options.max_grad_norm,
                flag=flag,
                work=work,
            )
        self._started[step] = started
        started.seconds = time.perf_counter() - self._begin
        self._begin = time.perf_counter()
        self._step = step + 1
        self._ready += map(self._finish, records)
        return self._take()

    def drain(self) -> tuple[StepResult, ...]:
        """Waits until the last step is final."""
        self.settle()
        return self._take()

    def settle(self) -> None:
        """Waits until the last step is final. Its result is returned later."""
        start = time.perf_counter()
        records = self._engine.drain()
        if records:
            self._started[records[-1].step].seconds += time.perf_counter() - start
        self._ready += map(self._finish, records)

    def _take(self) -> tuple[StepResult, ...]:
        results, self._ready = tuple(self._ready), []
        return results

    def _finish(self, record: StepRecord) -> StepResult:
        self.is_set_up = True
        meeting_of(self._engine.store.world).end_setup()
        step, started = record.step, self._started.pop(record.step)
        self.loss = record.loss
        if self.tracer is not None:
            self.tracer.observe(step, record.step_output.intervals)
        self.emit(self.rebalancer.observe(step, started.seconds, record.busy))
        result = self._result(record, started)
        if self.listen is not None:
            self.emit(self._step_event(result, record))
        if record.rollback is not None:
            self.emit(RollbackEvent(step, record.rollback.what, record.rollback.seconds))
        if record.switch is not None:
            self.emit(PostValidationEvent(step, record.switch.on, record.switch.reason))
        if record.skipped:
            self.emit(
                SkippedEvent(step, record.loss_scale, self._engine.optimizer_step.scaler.scale)
            )
        if self.elastic is not None:
            self.elastic.hear(record.flags)
        # Last, so that the ranks agree on the step whatever a case raises.
        self.cases.observe(Signals(step, record.loss, record.squared_norms, started.rate))
        return result

    def _step_event(self, result: StepResult, record: StepRecord) -> StepEvent:
        model, samples = self._engine.model.options, self.options.micro_batch
        if self._engine.model.count is not None:
            tokens = result.counted
        elif model is not None and samples is not None:
            tokens = self.options.global_batch * model.sequence
        else:
            tokens = 0
        return StepEvent(
            result.step,
            result.loss,
            tokens_per_s=tokens / result.seconds,
            idle_ratio=result.idle_ratio,
            imbalance=result.imbalance,
            seconds=result.seconds,
            gradient_norm=result.norm if math.isfinite(result.norm) else None,
            learning_rate=result.rate,
            layers=result.layers,
            frozen=result.frozen,
            model_flops_per_s=result.model_flops / result.seconds if result.model_flops else None,
            utilization=result.utilization,
            memory=result.memory,
            gpu_seconds_returned=0.0 if self.elastic is None else self.elastic.gpu_seconds_returned,
            inherent_idle=self._engine.schedule_keeper.inherent_idle(record.kinds),
            router_loss=result.router_loss,
        )

    def _result(self, record: StepRecord, started: _Started) -> StepResult:
        peak = self.peak_flops
        return StepResult(
            record.step,
            record.loss,
            record.norm,
            started.rate,
            started.seconds,
            record.busy,
            record.idle_ratio,
            record.skipped,
            record.rollback is not None,
            any(flag & STOP for flag in record.flags),
            started.layers,
            started.frozen,
            record.counted,
            record.memory,
            record.work,
            None if peak is None else peak * self._engine.store.world.everyone.size,
            record.router_loss,
        )
