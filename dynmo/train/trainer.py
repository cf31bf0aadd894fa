"""The training loop of one rank: change, rebalance, step, log, save.

It is the same on every rank, but only rank 0 writes.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dynmo.balance.partition import Partition, imbalance
from dynmo.config import Config
from dynmo.cost.layer_cost import LayerCost
from dynmo.dynamism import Dynamism, Signals, make_cases
from dynmo.errors import InputError, RunError
from dynmo.events import (
    ChangeEvent,
    EndEvent,
    EvalEvent,
    PostValidationEvent,
    RollbackEvent,
    SkippedEvent,
    StepEvent,
    TokensEvent,
    now,
)
from dynmo.models.identity import Identity
from dynmo.models.model import Model
from dynmo.pipeline.case_context import agree_on_cases
from dynmo.pipeline.cases import Cases
from dynmo.pipeline.engine import Engine, StepResult
from dynmo.pipeline.profile import profile_of
from dynmo.pipeline.rebalance import Rebalancer
from dynmo.pipeline.saving import state_of
from dynmo.runtime.comm.process_mesh import arrange
from dynmo.runtime.comm.world import World
from dynmo.runtime.layer.output_cache import Keys
from dynmo.schedule.bounds import Objective
from dynmo.train.assembly import join_pipeline, pipeline_for
from dynmo.train.dry_run import check_later_ranks, first_plan
from dynmo.train.elasticity import Elasticity
from dynmo.train.learning_rate import learning_rate
from dynmo.train.loader import DataLoader
from dynmo.train.rank_source import make_source
from dynmo.train.run_checkpoints import RunCheckpoints, SavedRun
from dynmo.train.run_log import Listener, RunLog
from dynmo.train.setup import (
    check_meshes,
    first_partition,
    memory_limit,
)
from dynmo.train.shape_costs import known_costs, shapes_of, with_workspace
from dynmo.train.stop_flag import stop_flag
from dynmo.train.summons import Summons
from dynmo.train.trace import Tracer

_logger = logging.getLogger(__name__)

# Bit of a step's flag: this rank wants to stop.
STOP = 1


@dataclass(frozen=True)
class RunResult:
    """The result of a finished run, the same on every rank.

    Attributes:
        loss: Loss of the last step.
        weights_digest: SHA-256 of the weights.
        buffers_digest: SHA-256 of the persistent buffers.
        seconds: Seconds of training, without the set-up.
        interrupted: Whether the run stopped on request.
        steps: Number of steps that are done.
        partition: Number of layers on each stage.
        left: Whether this rank has left the run, which goes on.
    """

    loss: float
    weights_digest: str
    buffers_digest: str
    seconds: float
    interrupted: bool
    steps: int
    partition: tuple[int, ...]
    left: bool = False


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


class _Origin(NamedTuple):
    """The point at which this process takes up the run.

    Attributes:
        step: Number of steps that are done.
        loss: Loss of the last step.
        moves: Number of times that layers have moved.
        reference: Seconds that a step took at first. None if no step was measured.
    """

    step: int = 0
    loss: float = math.nan
    moves: int = 0
    reference: float | None = None

    @classmethod
    def of(cls, saved: SavedRun | None, summons: Summons | None) -> _Origin:
        """Returns the origin of a run that starts, resumes or is joined.

        Args:
            saved: The checkpoint of a run that resumes.
            summons: Rank 0's message to a process that joins.
        """
        if saved is not None:
            return cls(saved.step, saved.loss, saved.moves, saved.reference)
        if summons is not None:
            state = summons.state
            return cls(summons.step, state["loss"], state["moves"], summons.reference)
        return cls()


class Trainer:
    """Trains as one rank of one run.

    Args:
        config: Config of the run.
        world: All ranks. The trainer arranges them in a mesh.
        model: The model to train.
        folder: `runs/NAME`. None means that nothing is written.
        resume: Whether to go on from the newest checkpoint.
        listen: Called with every event, on rank 0.
        summons: Rank 0's message to this process, if it joins a running run.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        model: Model,
        folder: Path | None,
        resume: bool = False,
        listen: Listener | None = None,
        summons: Summons | None = None,
    ) -> None:
        self.config, self._everyone, self._folder = config, world, folder
        self._checkpoints = RunCheckpoints(
            config, world, None if folder is None else folder / "checkpoints"
        )
        saved = self._checkpoints.find(model) if resume else None
        origin = _Origin.of(saved, summons)
        # Memory and shapes, for decisions that have to fit a memory.
        limit = memory_limit(config, world.device)
        self._shapes = self._known_shapes(model, limit, is_first=saved is None and summons is None)
        self._cases: list[Dynamism] = make_cases(config, model.layers)
        self._stepped = summons is not None  # whether a step is done
        self._barrier_stays = False  # although the config asks for none
        # Steps that have run and have no result yet.
        self._started: dict[int, _Started] = {}
        self.first_step, self._loss = origin.step, origin.loss
        # A newcomer takes part from the cases' own part of its first step on.
        self._joins_at = None if summons is None else summons.step
        self.pipeline = self._make_pipeline(model, saved, summons)
        self._case_calls = Cases(self._cases, self.pipeline)
        self._loader = DataLoader(config, self.pipeline)
        if saved is not None:
            self._checkpoints.restore(saved, self.pipeline, self._cases)
        self._rebalancer = Rebalancer(
            config,
            self.pipeline,
            self._costs,
            origin.moves,
            self._case_calls.forecasts,
            limit,
        )
        slices = self.pipeline.placement if self.pipeline.sliced else None
        self._tracer = Tracer(world.everyone, self.pipeline.clock, config.trace.steps, slices)
        self._elastic = Elasticity(
            config,
            self.pipeline,
            self._rebalancer,
            make_source(config, world, self.identity),
            origin.reference,
        )
        # The log is opened last, so that earlier errors leave no log.
        self._log = (
            RunLog(config, folder, listen) if world.rank == 0 else RunLog(config, None, None)
        )

    @property
    def _cached(self) -> int:
        """Bytes for outputs of frozen layers."""
        freezing = self.config.dynamism.freezing
        return freezing.cache_bytes if "freezing" in self.config.dynamism.cases else 0

    def _known_shapes(
        self, model: Model, limit: int | None, is_first: bool
    ) -> tuple[LayerCost, ...] | None:
        """Returns the layers' bytes by shapes, if a memory limits them.

        Args:
            model: The model.
            limit: Bytes of a rank. None means unlimited.
            is_first: Whether the first plan must fit the limit too.
        """
        if limit is None:
            return None
        costs, unknown = known_costs(self.config, model)
        if unknown is not None and self._everyone.rank == 0:
            _logger.warning(unknown)
        if is_first and self.config.pipeline.memory_limit is not None:
            check_later_ranks(self.config, model, costs, self._everyone.device)
            first_plan(self.config, model, costs, self._everyone.device, unknown)
        return costs if unknown is None else None

    def _make_pipeline(
        self, model: Model, saved: SavedRun | None, summons: Summons | None
    ) -> Engine:
        """Makes the pipeline of a run that starts, resumes or is joined."""
        if summons is None:
            pipeline = self._first_pipeline(model, saved)
            agree_on_cases(self._everyone, self._cases)
            return pipeline
        return join_pipeline(self.config, self._everyone, model, self._cases, summons, self._cached)

    def _first_pipeline(self, model: Model, saved: SavedRun | None) -> Engine:
        """Makes the pipeline of a run that starts or resumes."""
        config = self.config
        pipeline, data = config.shape_at(0) if saved is None else saved.shape(config)
        partition = first_partition(config, model.layers, pipeline)
        check_meshes(config, model.layers)
        if saved is not None and len(saved.partition) == partition.ranks:
            partition = Partition(saved.partition)
        return pipeline_for(config, arrange(self._everyone, data), model, partition, self._cached)

    @property
    def identity(self) -> Identity:
        """What decides the numbers of the run."""
        return self.pipeline.layer_states.identity.with_code(self._cases)

    @property
    def world(self) -> World:
        """This rank's pipeline, which is one of the mesh."""
        return self.pipeline.world

    # -- the loop ----------------------------------------------------------------------------------

    def run(self) -> RunResult:
        # The flag stays until the last event. A signal after the last step must not cut the account
        # short.
        with stop_flag() as stopping:
            try:
                return self._run(stopping)
            finally:
                self._elastic.close()
                self._log.close()

    def _run(self, stopping: Callable[[], bool]) -> RunResult:
        train, start = self.config.train, time.perf_counter()
        interrupted, step = False, self.first_step
        self._tell_barrier(step)
        while step < train.steps and not interrupted:
            try:
                interrupted = self.advance(step, stopping())
            except InputError as error:
                if not self._stepped:
                    raise
                raise RunError(str(error)) from error  # not wrong input, because steps have run
            if self._elastic.left:
                return RunResult(
                    self._loss, "", "", time.perf_counter() - start, False, step, (), left=True
                )
            step += 1
        return self.finish(step, time.perf_counter() - start, interrupted)

    def advance(self, step: int, stop: bool = False) -> bool:
        """Runs one turn of the loop: changes, step, evaluation, checkpoint.

        Args:
            step: Number of the step.
            stop: Whether this rank wants to stop.

        Returns:
            True if some rank wants to stop.
        """
        train = self.config.train
        interrupted = self._must_drain(step) and self._drain()
        self._change(step)
        if self._elastic.left:
            return False
        interrupted = self._step(step, stop) or interrupted
        step += 1
        evaluates = bool(train.eval_every) and step % train.eval_every == 0
        if (
            evaluates
            or interrupted
            or step == train.steps
            or self._checkpoints.is_due(step, interrupted)
        ):
            # A wish to stop may be found in any of the results.
            interrupted = self._drain() or interrupted
        if evaluates:
            self._evaluate(step)
        if self._checkpoints.is_due(step, interrupted):
            reference = self._elastic.reference
            self._log.emit(
                self._checkpoints.save(
                    step, self.pipeline, self._cases, self._loss, self._rebalancer.moves, reference
                )
            )
        return interrupted

    def finish(self, step: int, seconds: float, interrupted: bool = False) -> RunResult:
        """Ends the run after the last turn.

        Args:
            step: Number of steps that are done.
            seconds: Seconds that they took.
            interrupted: Whether the run stops on request.

        Returns:
            The result of the run.
        """
        self._drain()
        self._log.emit(self._rebalancer.close_measurement(step))
        digest, buffers = self.pipeline.digest(), self.pipeline.layer_states.buffers_digest()
        if step > self.first_step:
            self._tracer.finish(None if self._folder is None else self._folder / "trace.json")
        overhead, measurements = self._rebalancer.overhead, self.pipeline.measurements
        spared, cached = measurements.cached() if measurements.caches else (0, 0)
        if step > self.first_step:
            # Last: rank 0 may compute for seconds, and no rank waits for it.
            self._record_costs(step - self.first_step)
        self._log.emit(
            EndEvent(
                step,
                now(),
                self._loss,
                digest,
                seconds,
                reason="interrupted" if interrupted else "done",
                measure_seconds=self.pipeline.profiler.spent + overhead.measure,
                decide_seconds=overhead.decide,
                move_seconds=overhead.move,
                spared_forwards=spared,
                cached_bytes=cached,
                buffers_digest=buffers,
                gpu_seconds_returned=self._elastic.gpu_seconds_returned,
            )
        )
        return RunResult(
            self._loss, digest, buffers, seconds, interrupted, step, self.pipeline.partition.counts
        )

    def _must_drain(self, step: int) -> bool:
        """Returns True if the step before must be final.

        Something before this step may then change the model, or read it or the last signals.
        """
        return (
            self._rebalancer.should_check(step)
            or self._elastic.acts(step)
            or any(case.acts(step) for case in self._cases)
        )

    def _change(self, step: int) -> None:
        """Changes the ranks or the mesh, or lets the balancer decide. Then the cases act."""
        if step != self._joins_at:
            self._collect(step)
            self._resize(step)
            if self._elastic.left:
                return
        shape = self.config.shape_at(step)
        wanted = None
        if self.config.elastic.reshape:
            wanted = self._rebalancer.mesh(step) if self._rebalancer.is_due(step) else None
        elif (
            shape != self.pipeline.shape
            and shape[0] * shape[1] == self.world.everyone.size
            and self.config.elastic.reshape_at
        ):
            wanted = (*shape, first_partition(self.config, self.pipeline.count, shape[0]))
        if wanted is not None:
            self._reshape(step, *wanted)
        if self._rebalancer.is_due(step):
            for event in self._rebalancer.consider(step):
                self._log.emit(event)
                self._tracer.keep_around()
        for case, change in self._case_calls.act(step):
            self._log.emit(self._rebalancer.on_workload_change(step))
            self._tracer.keep_around()
            self._log.emit(ChangeEvent(step, now(), case.name, change.layers, change.what))
            if change.options and case.name in self.config.dynamism.cases:
                self._log.record_options(case.name, change.options)

    def _collect(self, step: int) -> None:
        for case, shares in self._case_calls.collect(step):
            self._log.emit(TokensEvent(step, now(), case.name, shares.layers, shares.shares))

    def _resize(self, step: int) -> None:
        """Goes on with fewer ranks, or with newcomers, if that is decided."""

        def state() -> dict[str, Any]:
            return state_of(
                self.pipeline,
                self._cases,
                loss=self._loss,
                moves=self._rebalancer.moves + 1,
                extra={},
            )

        size = self.world.everyone.size
        met = self._elastic.change(step, state)
        if met and not self._elastic.left:
            if self._elastic.config is not self.config:
                self.config = self._elastic.config
                self._log.record_micro_batch(self.config.train.micro_batch)
            self._loader = DataLoader(self.config, self.pipeline)
            if self.world.everyone.size > size:
                self._tracer.renew()
            self._tracer.keep_around()
            self._tell_barrier(step)
        for event in self._elastic.take_events(step):
            self._log.emit(event)

    def _reshape(self, step: int, pipeline: int, data: int, partition: Partition) -> None:
        """Makes the same ranks `data` replicas of a pipeline of `pipeline` ranks."""
        before = self.pipeline.shape
        for event in self._rebalancer.reshape(step, pipeline, data, partition):
            self._log.emit(event)
        if self.pipeline.shape != before:
            self._loader = DataLoader(self.config, self.pipeline)
            self._tracer.keep_around()
            self._tell_barrier(step)

    def _tell_barrier(self, step: int) -> None:
        """Reports if post-validation is not possible although the config asks for it.

        A weight tied over two ranks gets its gradient from both, so the barrier stays. A mesh that
        has the weight on one rank needs no barrier.
        """
        stays = (
            self.config.pipeline.post_validation and self.pipeline.objective is Objective.MAKESPAN
        )
        if stays != self._barrier_stays:
            self._barrier_stays = stays
            reason = (
                "the tied weight of embedding and head is on "
                f"{'two ranks' if stays else 'one rank'}"
            )
            self._log.emit(PostValidationEvent(step, now(), not stays, reason))

    def _step(self, step: int, stop: bool) -> bool:
        """Runs a step, and reports the steps that are final now.

        Returns:
            True if a rank wants to stop.
        """
        train, start = self.config.train, time.perf_counter()
        rate = learning_rate(train, step)
        self._started[step] = _Started(
            rate, self.pipeline.partition.counts, len(self.pipeline.frozen)
        )
        inputs, targets, keys = self._loader.train(step)
        flag = STOP * stop + self._elastic.call()
        results = self.pipeline.advance(
            step, inputs, targets, lr=rate, max_norm=train.max_grad_norm, flag=flag, keys=keys
        )
        self._started[step].seconds = time.perf_counter() - start
        return self._finish(results)

    def _drain(self) -> bool:
        """Waits until the last step is final. Returns True if a rank wants to stop."""
        start = time.perf_counter()
        results = self.pipeline.drain()
        if results:
            self._started[results[-1].step].seconds += time.perf_counter() - start
        return self._finish(results)

    def _finish(self, results: Sequence[StepResult]) -> bool:
        for result in results:
            self._tell(result, self._started.pop(result.step))
            self._elastic.hear(result.flags)
        return any(flag & STOP for result in results for flag in result.flags)

    def _tell(self, result: StepResult, started: _Started) -> None:
        """Hands a step's result to cases, balancer and log."""
        step, seconds = result.step, started.seconds
        self._stepped = True
        self._loss = result.loss
        self._case_calls.observe(Signals(step, result.loss, result.squared_norms, started.rate))
        self._tracer.observe(step, result.step_output.intervals)
        self._log.emit(self._rebalancer.observe(step, seconds, result.busy))
        tokens = self.config.train.global_batch * self.config.model.sequence
        self._log.emit(
            StepEvent(
                step,
                now(),
                result.loss,
                tokens_per_s=tokens / seconds,
                idle_ratio=result.idle_ratio,
                imbalance=imbalance(result.busy),
                seconds=seconds,
                gradient_norm=result.norm if math.isfinite(result.norm) else None,
                learning_rate=started.rate,
                layers=started.layers,
                frozen=started.frozen,
            )
        )
        if result.rollback is not None:
            self._log.emit(
                RollbackEvent(step, now(), result.rollback.what, result.rollback.seconds)
            )
        if result.switch is not None:
            self._log.emit(PostValidationEvent(step, now(), result.switch.on, result.switch.reason))
        if result.skipped:
            self._log.emit(SkippedEvent(step, now(), result.loss_scale, self.pipeline.scaler.scale))

    def _evaluate(self, step: int) -> None:
        train, pipeline = self.config.train, self.pipeline
        inputs, targets, keys = self._loader.held_out(train.eval_batches)
        tokens = train.eval_batches * train.micro_batch * self.config.model.sequence

        def evaluate(keys: Keys | None) -> tuple[float, float]:
            start = time.perf_counter()
            loss = pipeline.evaluate(inputs, targets, train.eval_batches, keys)
            return loss, tokens / (time.perf_counter() - start)

        results = evaluate(keys)
        for dense in self._case_calls.dense():
            with dense:
                results += evaluate(None)  # the cache belongs to the other evaluation
        self._log.emit(EvalEvent(step - 1, now(), *results))

    def _costs(self) -> tuple[LayerCost, ...]:
        return with_workspace(self.pipeline.costs(), self._shapes, self.pipeline.recomputed)

    def _record_costs(self, steps: int) -> None:
        """Writes the layers' costs at the end, for `dynmo plan runs/<name>`."""
        costs = self._costs()
        if self._log.writes:
            if self._shapes is None:
                costs = with_workspace(
                    costs, shapes_of(self.config, self.pipeline.model), self.pipeline.recomputed
                )
            self._log.record_costs(profile_of(self.config, self.pipeline, costs, steps))
