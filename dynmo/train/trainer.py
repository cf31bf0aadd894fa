"""The training loop of one rank: change, step, log, save.

It is the same on every rank, but only rank 0 writes. `dynmo.Pipeline` does the work.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from dynmo import Checkpoints, Pipeline, StepResult
from dynmo.change_events import ChangeEvent
from dynmo.config import Config, with_options
from dynmo.elastic.manager import own_node
from dynmo.errors import InputError, RunError
from dynmo.event_log import has_ended
from dynmo.events import EndEvent, EvalEvent, Event, HeldOutEvent
from dynmo.models.model import Model
from dynmo.runtime.comm.agreement import share_failures
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.comm.signed_store import SignedStore
from dynmo.runtime.comm.waits import call_with_limit
from dynmo.runtime.comm.worker import said_while
from dynmo.signals import Asked, signals_heard
from dynmo.train.data import open_data
from dynmo.train.run_log import Listener, RunLog
from dynmo.train.setup import own_cases

_logger = logging.getLogger(__name__)

# Most seconds that the next rank 0 waits until the former one has closed its log.
_CLOSED = 10.0


@dataclass(frozen=True)
class Lowest:
    """The lowest held-out loss so far.

    Attributes:
        step: Number of steps that were done then. None before the first finite loss.
        misses: Evaluations since then.
    """

    step: int | None = None
    loss: float | None = None
    misses: int = 0

    def after(self, step: int, loss: float) -> Lowest:
        """Returns the lowest loss after one more evaluation."""
        if loss < (math.inf if self.loss is None else self.loss):
            return Lowest(step, loss)
        return replace(self, misses=self.misses + 1)


@dataclass(frozen=True)
class RunResult:
    """The result of a finished run, the same on every rank.

    Attributes:
        weights_digest: SHA-256 of the weights.
        buffers_digest: SHA-256 of the persistent buffers.
        seconds: Seconds of training, without the set-up.
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


class Trainer:
    """Trains as one rank of one run.

    Args:
        world: All ranks. The trainer arranges them in a mesh.
        model: The model to train.
        folder: `runs/NAME`. None means that nothing is written.
        resume: Whether to go on from the newest checkpoint.
        listen: Called with every event while this process is rank 0.
    """

    def __init__(
        self,
        config: Config,
        world: Meeting,
        model: Model,
        folder: Path | None,
        resume: bool = False,
        listen: Listener | None = None,
    ) -> None:
        self.config, self._folder = config, folder
        self._checkpoints = None if folder is None else folder / "checkpoints"
        self._log: RunLog | None = None
        self._leads = False  # whether the log is that of rank 0
        self._early: list[Event] = []
        self._stepped = False  # whether a step is done
        self._asked = Asked()
        self.on_new_folder: Callable[[], object] = lambda: None  # after the run's own was removed
        self._world, self._model, self._listen = world, model, listen
        self.pipeline = Pipeline(
            model,
            world,
            cases=[*config.dynamism.named.values(), *own_cases(config)],
            resume=self._checkpoints if resume else None,
            checkpoint=self._saves(config),
            **config.pipeline_arguments(listen=self._tell, trace=config.trace.steps),
        )
        self.first_step = self.pipeline.steps
        self._lowest = Lowest(**self.pipeline.extra.get("lowest", {}))
        # Steps before the last evaluation. Older checkpoints were saved after it.
        self._evaluated: int = self.pipeline.extra.get("evaluated", self.first_step)
        if resume and self._is_done and world.rank == 0:
            end = (
                f"train.patience = {config.train.patience}"
                if self.first_step < config.train.steps
                else f"train.steps = {config.train.steps}"
            )
            _logger.warning(
                f"{self._checkpoints}/step-{self.first_step:06d} has {self.first_step} steps, and "
                f"{end}: nothing is left to train; its loss is {self.pipeline.measured.loss:.6f}"
            )
        self._mesh: tuple[int, ...] | None = None
        self._met = 0  # the generation in which the ranks have compared their data last
        if not self.pipeline.left:
            with said_while(world.rank, "reads its data"):
                self._follow_mesh()
            self._open_log()

    def _saves(self, config: Config) -> Checkpoints | None:
        """Returns where and how often the pipeline saves by itself."""
        if self._checkpoints is None:
            return None
        given = {
            key: getattr(config.checkpoint, key) for key in type(config.checkpoint).model_fields
        }
        own = {key: value for key, value in given.items() if key in Checkpoints.model_fields}
        return Checkpoints(folder=self._checkpoints, extra=self._extra, **own)

    def _extra(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps of the loop."""
        state = self._data.state_dict()
        own = {"lowest": asdict(self._lowest), "evaluated": self._evaluated}
        return own | ({"data": state} if state else {})

    def _open_log(self) -> None:
        # The log is opened last, so that earlier errors leave no log.
        config = self.config
        if self._log is not None:
            config = self._log.config
            self._log.close()
            if self._world.leads:
                # Another machine sees all of a shared file once it is closed.
                key, limit = f"log closed/{self._world.generation - 1}", self._most_for_log
                with contextlib.suppress(RuntimeError):  # the former rank 0 has died
                    self._home.wait([key], timedelta(seconds=limit))
        self._leads = self._world.leads  # a newcomer has its rank only now
        folder, listen = (self._folder, self._listen) if self._leads else (None, None)
        if self._is_done and folder is not None and has_ended(folder / "events.jsonl"):
            folder = None  # nothing trains, and the log is whole
        elif folder is not None and not folder.is_dir():
            folder.mkdir(parents=True)
            _logger.warning(
                f"rank 0 is on {own_node()} now, which does not see the run's folder; the log goes "
                f"on there, in {folder.absolute()}"
            )
        self._log = RunLog(config, folder, listen, goes_on=self._log is not None)
        for event in self._early:
            self._tell(event)
        self._early.clear()

    @property
    def _is_done(self) -> bool:
        train = self.config.train
        return self.pipeline.steps >= train.steps or self._lowest.misses >= (
            train.patience or math.inf
        )

    def join(self, stopping: Callable[[], bool]) -> bool:
        """Waits until the run needs this process. Returns False if the run is over."""
        if not self.pipeline.join(stopping):
            return False
        # A newcomer takes part in the others' changes first, and reads its data then.
        self._stepped, self._mesh = True, None
        self.first_step = self._evaluated = self.pipeline.steps  # the others have evaluated
        self._lowest = Lowest(**self.pipeline.extra.get("lowest", {}))
        self._open_log()
        return True

    def _tell(self, event: Event) -> None:
        if self._log is None:
            self._early.append(event)
            return
        if self._leads != self._world.leads:  # rank 0 has left
            self._open_log()
        if self._log.is_removed:
            self._make_folder_again()
        self._log.emit(event)
        if (
            isinstance(event, ChangeEvent)
            and event.options
            and event.case in self.config.dynamism.named
        ):
            self._log.record_options(event.case, event.options)

    def _make_folder_again(self) -> None:
        """Goes on in a new folder after the run's own was removed or moved, and saves there."""
        folder = self._folder
        assert self._log is not None
        assert folder is not None
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(
                f"{folder} was removed or moved, and cannot be made again: {error.strerror}"
            ) from None
        self._log.close()
        self._log = RunLog(self._log.config, folder, self._listen, goes_on=True)
        self._log.write_config()
        self.on_new_folder()
        saves = " and saves there" if self._log.config.checkpoint.every else ""
        _logger.warning(
            f"{folder} was removed or moved while the run trains; the run makes it anew{saves}"
        )
        self._asked.saves += 1

    # -- the loop ----------------------------------------------------------------------------------

    def run(self) -> RunResult:
        # The flag stays until the last event. A signal after the last step must not cut the account
        # short.
        with signals_heard() as self._asked:
            start = time.perf_counter()
            try:
                return self._run(start)
            except RunError:
                if not self.pipeline.left:
                    raise
                # After a fault the others have no place for this rank, whatever it was at.
                return self._left(time.perf_counter() - start)
            finally:
                if self._log is not None:
                    self._log.close()
                if self._leads and self.pipeline.left:
                    key = f"log closed/{self._world.generation}"
                    with contextlib.suppress(RuntimeError, TimeoutError):  # the store is lost
                        call_with_limit(self._most_for_log, lambda: self._home.set(key, "1"))
                self.pipeline.close()
                if self._mesh is not None:
                    self._data.close()

    @property
    def _most_for_log(self) -> float:
        """Seconds of `_CLOSED`, or less, because the other ranks wait meanwhile."""
        return min(_CLOSED, self._world.usual_timeout / 2)

    @property
    def _home(self) -> SignedStore:
        assert self._world.home is not None, "ranks of a program's own process groups stay"
        return self._world.home

    def _run(self, start: float) -> RunResult:
        interrupted = False
        if self._must_evaluate and self._evaluated < self.pipeline.steps:
            self._evaluate_and_save(interrupted)  # time ran out before it
        while not self._is_done and not interrupted:
            try:
                interrupted = self.turn(self._asked.stops > 0)
            except InputError as error:
                if not self._stepped:
                    raise
                raise RunError(str(error)) from error  # not wrong input, because steps have run
            if self.pipeline.left:
                return self._left(time.perf_counter() - start)
        result = self.finish(time.perf_counter() - start, interrupted)
        is_short = interrupted and not result.left and result.steps < self.config.train.steps
        if is_short and self.config.data.has_samples:
            self._check_samples()
        return result

    def _left(self, seconds: float) -> RunResult:
        """Returns the result of a rank that has left the run."""
        loss, step = self.pipeline.measured.loss, self.pipeline.steps
        if self._leads:
            _logger.warning(f"rank 0 has left after step {step}; another rank goes on")
        return RunResult(loss, "", "", seconds, False, step, (), left=True)

    def _check_samples(self) -> None:
        """Raises RunError on every rank if a broken sample has ended the run."""
        fault, what = self._data.fault, "whether a sample is broken"
        told = self.pipeline.mesh.together(lambda: share_failures(self._world, fault, what))
        for text in told.values():
            raise RunError(text)

    def turn(self, stop: bool = False) -> bool:
        """Runs one turn of the loop: changes, step, evaluation, checkpoint.

        Returns:
            True if some rank wants to stop.
        """
        train, pipeline = self.config.train, self.pipeline
        interrupted = self._finish(pipeline.adapt())
        if pipeline.left:
            return False
        if self._log is not None:
            self._log.record_decisions(pipeline.measured.decisions)
        with said_while(self._world.rank, "reads its data", not self._stepped):
            self._follow_mesh()
            inputs, targets, samples = self._data.train(pipeline.steps)
            reread = partial(self._data.again, pipeline.steps)
        stop |= self._data.fault is not None and pipeline.steps + 1 < train.steps
        results = pipeline.advance(inputs, targets, samples=samples, stop=stop, reread=reread)
        interrupted |= self._finish(results)
        if pipeline.left:
            return False
        step = pipeline.steps
        if self._must_evaluate or interrupted or step == train.steps:
            # A wish to stop may be found in any of the results.
            interrupted |= self._finish(pipeline.drain())
        if self._must_evaluate and not pipeline.left:
            self._evaluate_and_save(interrupted)
        return interrupted

    def _evaluate_and_save(self, interrupted: bool) -> None:
        """Evaluates. Saves the best so far, and a run that a stop has saved before."""
        self._evaluate()
        options, step = self.config.checkpoint, self.pipeline.steps
        best = step if options.keep_best and self._lowest.step == step else None
        # A stop has saved before, in case that time runs out now.
        again = best is not None or (interrupted and options.every)
        if again and self._checkpoints is not None:
            self.pipeline.save(self._checkpoints, options.keep, self._extra(), best, wait=False)

    @property
    def _must_evaluate(self) -> bool:
        every, step = self.config.train.eval_every, self.pipeline.steps
        return bool(every) and step > 0 and step % every == 0

    def _follow_mesh(self) -> None:
        """Reads other data if the mesh or its ends have changed.

        Microbatches are of the present size.

        All ranks call it together, except after a fault.
        """
        pipeline, size = self.pipeline, self.pipeline.options.micro_batch
        if size is not None and size != self.config.train.micro_batch:
            self.config = with_options(self.config, ("train",), {"micro_batch": size})
            if self._log is not None:
                self._log.record_micro_batch(size)
        mesh = (*pipeline.mesh.shape, *pipeline.mesh.ends)
        is_new = self._mesh is None or pipeline.mesh.grown > self._met
        if self._mesh == mesh and not is_new:
            return
        if self._mesh is None or not self.config.data.has_samples:  # samples follow by themselves
            state = pipeline.extra.get("data")
            # After a fault each rank goes on by itself: all have read, and another one may have
            # drawn its next batch already.
            compares = is_new or self.config.elastic.recover == "none"
            self._met = pipeline.mesh.world.generation
            self._data = open_data(self.config, pipeline, self._model, state, compares)
        data = self.config.data
        uses = data.held_out != 0 and (data.has_samples or self.config.train.eval_every)
        if self._mesh is None and uses:
            text, train = self._data.evaluates_on, self.config.train
            if train.eval_every:
                many = f"{train.eval_batches} microbatches of {train.micro_batch}"
                text += f"; each evaluation reads {many} (train.eval_batches)"
            self._tell(HeldOutEvent(pipeline.steps, text))
        self._mesh = mesh

    def finish(self, seconds: float, interrupted: bool = False) -> RunResult:
        """Ends the run after the last turn, whose steps took so many seconds."""
        pipeline = self.pipeline
        self._finish(pipeline.finish())
        if pipeline.left:
            return self._left(seconds)
        step, digest, buffers = pipeline.steps, pipeline.digest(), pipeline.digest(buffers=True)
        trace = None if self._folder is None else self._folder / "trace.json"
        if step > self.first_step:
            pipeline.measured.save_trace(trace)
        loss, account = pipeline.measured.loss, pipeline.measured.account()
        is_whole, lowest = step >= self.config.train.steps, self._lowest
        if lowest.step is not None and self._log is not None and self._log.writes:
            _logger.warning(f"lowest held-out loss {lowest.loss:.6f} after step {lowest.step}")
        if step > self.first_step:
            # Last: rank 0 may compute for seconds, and no rank waits for it.
            costs = pipeline.measured.costs()
            if self._log is not None and self._log.writes:
                self._log.record_costs(pipeline.measured.profile(step - self.first_step, costs))
        self._tell(
            EndEvent(
                step,
                loss,
                digest,
                seconds,
                reason="interrupted" if interrupted else "done" if is_whole else "stopped",
                **vars(account),
                buffers_digest=buffers,
                load=os.getloadavg()[0],
                cores=os.cpu_count(),
                device=self._world.device.type,
            )
        )
        counts = pipeline.mesh.partition.counts
        return RunResult(loss, digest, buffers, seconds, interrupted, step, counts)

    def settle(self) -> bool:
        """Waits for the verdict on the newest step. Returns whether the run is to stop."""
        return self._finish(self.pipeline.drain())

    def _finish(self, results: Sequence[StepResult]) -> bool:
        """Takes the results of steps. Returns True if a rank wants to stop."""
        self._stepped = self._stepped or bool(results)
        return any(result.stop for result in results)

    def _evaluate(self) -> None:
        train, pipeline = self.config.train, self.pipeline
        inputs, targets, samples = self._data.evaluation(train.eval_batches)
        tokens = train.eval_batches * train.micro_batch * self.config.model.sequence
        if isinstance(inputs, list):
            tokens = sum(each["input_ids"].numel() for each in inputs)

        def evaluate(dense: bool) -> tuple[float, float]:
            start = time.perf_counter()
            loss = pipeline.evaluate(
                inputs,
                targets,
                dense=dense,
                microbatches=train.eval_batches,
                shared=True,
                samples=samples,
            )
            return float(loss), tokens / (time.perf_counter() - start)

        results = evaluate(dense=False)
        if pipeline.cases.has_dense:
            results += evaluate(dense=True)
        self._evaluated = pipeline.steps
        told = EvalEvent(pipeline.steps - 1, *results, held_out=self._data.evaluates_on)
        self._tell(told)
        if train.patience is not None or self.config.checkpoint.keep_best:
            self._lowest = self._lowest.after(pipeline.steps, results[0])
            pipeline.extra["lowest"] = asdict(self._lowest)  # newcomers get it
