"""The end of a step without a barrier.

The step is made on what the ranks before know. It is pending until its verdict is in.

    end(step)     makes the step if the prefix has nothing against it, and tells the next rank;
                  then the next step begins
    its program   F F F ?   `is_validated` takes the verdict; a step that failed is taken back,
                  and made again if it only clips
    final         takes the verdict at once, before anything that reads or changes the model

`norm_ring.py` says how the table passes the ranks. The barrier returns while many steps are taken
back.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from dynmo.errors import RunError
from dynmo.runtime.engine.batch_check import StepSettings
from dynmo.runtime.engine.executor import Executor, StepOutput
from dynmo.runtime.engine.norm_ring import NormRing
from dynmo.runtime.engine.optimizer_step import CLIPPED, NON_FINITE, OptimizerStep
from dynmo.runtime.engine.step_reduction import Rollback, StepRecord, Switch
from dynmo.runtime.optim.optimizer import ParameterShare, shares_in
from dynmo.runtime.state.layer_store import LayerStore

# The last `_WINDOW` steps decide. The barrier returns if more than `_MOST` of them were taken back.
# It goes if at most `_FEW` of them would have been.
_WINDOW, _MOST, _FEW = 20, 5, 1

# Ranks were given different batches, and the run ends.
_MISMATCHED = "mismatched"


@dataclass
class _Pending:
    """A step whose verdict is still out.

    Attributes:
        stepped: Whether this rank has made the step.
        ended: Whether the next rank knows of it.
    """

    settings: StepSettings
    step_output: StepOutput
    stepped: bool
    ended: bool = False


class _Failure(NamedTuple):
    """The error of a step that has changed nothing. All ranks raise it in the same call."""

    step: int
    error: Exception
    undo: Callable[[], None] = lambda: None


class PostValidation:
    """Holds the last step until it is final, and results that nobody has taken yet.

    Args:
        validates: Whether steps are validated afterwards.
        copies: Whether optimizers keep copies then, to take steps back.

    Attributes:
        is_halfway: Whether some weights are as before a step and some as after it, and no copies
            can take it back.
    """

    def __init__(
        self,
        store: LayerStore,
        end: OptimizerStep,
        *,
        validates: bool,
        copies: bool,
        find_cause: Callable[[StepRecord], StepRecord],
        explain: Callable[[Exception], Exception],
        attempt: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._store, self._end, self._attempt = store, end, attempt
        self._find_cause, self._explain = find_cause, explain
        self._enabled = self._has_no_barrier = validates
        # Whether the last steps were taken back, or would have been.
        self._recent: deque[bool] = deque(maxlen=_WINDOW)
        self.ring = self._new_ring()
        self.copies = validates and copies
        self._pending: _Pending | None = None
        self._done: list[StepRecord] = []  # results that nobody has been given yet
        self._failure: _Failure | None = None
        # Gives buffers the values from before the last step, if it was just skipped.
        self._undo_skipped: Callable[[], None] | None = None
        self._failed_step: int | None = None
        self.is_halfway = False
        # Number of steps that this rank has ended, and its parts of the tables of the last two.
        self._ended = 0
        self._parts: deque[Tensor] = deque(maxlen=2)
        self._begun = 0.0  # when the program started that now runs

    @property
    def validates(self) -> bool:
        """Whether the next step has no barrier. A weight tied over two ranks needs one."""
        return self._has_no_barrier and not self._store.tied.spans_ranks

    @property
    def is_out(self) -> bool:
        """Whether the verdict on a step is still out."""
        return self._pending is not None

    def begin(self) -> None:
        """Prepares for the program of a step that will be left pending."""
        if self._pending is None:
            self.ring.expect()
        self._begun = time.perf_counter()

    def is_validated(self, executor: Executor) -> bool:
        """Returns whether the next step's program may go on. Called in the middle of it."""
        is_validated = self._judge(self.ring.verdict())
        if self._failure is None:
            self.ring.expect()
        executor.scale_loss(self._end.scaler.scale)  # no B has started
        return is_validated

    @property
    def has_skipped(self) -> bool:
        """Whether the step before has just been skipped because it was not finite."""
        return self._undo_skipped is not None

    def finish_skip(self, *, looks: bool = True) -> None:
        """Takes back what a skipped step has left. No program may run.

        Args:
            looks: Whether to find the cause, which all ranks do together.
        """
        if self._undo_skipped is not None:
            self._undo_skipped()
            self._undo_skipped = None
            if looks:
                self._done[-1] = self._find_cause(self._done[-1])

    def end(self, settings: StepSettings, step_output: StepOutput) -> None:
        """Makes the step if ranks so far have nothing against it, and tells the next."""
        if self._failure is not None:
            self._end.discard()
            step_output.undo()
            return
        self._end.prepare()
        entries = self._end.table.entries(step_output, settings.flag)
        prefix = self.ring.prefix(entries)
        scale = self._end.scaler.scale
        known = self._end.table.read(settings.step, prefix[None], step_output, scale)
        # The norms alone decide: they are the same on all replicas, which must do alike. The
        # verdict finds a loss that is not finite.
        stepped = self._end.failed(0.0, known.squared_norms, settings.max_norm) is None
        pending = _Pending(settings, step_output, stepped)
        if stepped:
            if self.copies:
                for share in self._shares:
                    share.keep()
            self._pending, self.is_halfway = pending, not self.copies
            # The step assumes that the global norm will not clip. A layer's own norm is known.
            limit = settings.max_norm if self._end.clip_scope == "local" else 0.0
            self._end.apply(known, settings.rates, limit)
            self.is_halfway = False
        self.ring.pass_on(self._end.table.complete(prefix) if self.ring.completes else prefix)
        self._pending, pending.ended = pending, True
        self._ended += 1
        self._parts.append(entries)
        self._end.observe()

    @property
    def final(self) -> LayerStore:
        """The layers once the last step is final, for whoever reads or changes the model."""
        self.settle()
        return self._store

    def drain(self) -> tuple[StepRecord, ...]:
        self.settle()
        return self.take_done()

    def settle(self) -> None:
        """Waits until the last step is final."""
        if self._pending is not None:
            self._begun = time.perf_counter()
            with self._attempt():
                self._judge(self.ring.verdict())
                self.finish_skip()
        self.raise_failure()

    def assert_final(self) -> None:
        """Raises RunError while a step is pending, for calls on one rank alone."""
        if self._pending is not None:
            raise RunError(
                f"step {self._pending.settings.step} may still be taken back; call drain() on all "
                "ranks first (a case: see Dynamism.acts)"
            )

    def _judge(self, table: Tensor) -> bool:
        """Acts on the verdict. Returns False if the step was not made as assumed."""
        pending = self._pending
        assert pending is not None
        end, (step, rates, max_norm, _) = self._end, pending.settings
        self._pending = None
        result = end.table.read(step, table, pending.step_output, end.scaler.scale)
        failed = end.failed(result.loss, result.squared_norms, max_norm)
        error: Exception | None = end.table.wrong_batch(step, table)
        if error is not None:
            failed = _MISMATCHED
        result = self.observed(result, failed)
        if failed is not None:
            self.is_halfway = True
            self._take_back(pending)
            if failed == CLIPPED:
                end.apply(result, rates, max_norm)
            self.is_halfway = False
            if failed == NON_FINITE and end.is_overflow(result):
                result = end.overflowed(result)
            elif failed == NON_FINITE and end.not_finite.next_ends:
                error = end.error(result)
            elif failed == NON_FINITE:
                result = end.skip(result)
                self._undo_skipped = pending.step_output.undo
            result = replace(result, rollback=Rollback(failed, time.perf_counter() - self._begun))
        if error is not None:
            self._failure = _Failure(step, error, pending.step_output.undo)
        else:
            if failed != NON_FINITE:
                end.observe_update()
            self._done.append(result)
        self._forget()
        end.drop_gradients()
        return failed is None

    def _take_back(self, pending: _Pending | None) -> None:
        """Takes back what this rank has made of a step. Peers exchange parameters, with ZeRO-1."""
        if pending is not None and pending.stepped:
            update, layers = self._store.update, self._end.trained.values()
            if self.copies:
                update.restore(layers)
            else:
                update.invert(layers, pending.settings.rates)
        self._end.share()

    def _forget(self) -> None:
        for share in self._shares:
            share.forget()

    @property
    def _shares(self) -> Iterator[ParameterShare]:
        return shares_in(self._store.optimizers.values())

    def recover(self, step: int | None, error: Exception) -> bool:
        """Has all ranks go on from the last step that all have ended. All of them have failed.

        Args:
            step: The step that this rank was at, without a barrier. None: it waited for the last.

        Returns:
            Whether the error is kept for the next call, so that all ranks raise it in one call.
        """
        if not self._enabled:
            self._end.drop_all_gradients()
            return False
        everyone, pending = self._store.world.everyone, self._pending
        self.finish_skip(looks=False)
        ended = everyone.gather(torch.tensor(self._ended), "the steps that have ended")
        is_ahead = self._ended > int(ended.min())
        undone = pending if pending is not None and (is_ahead or not pending.ended) else None
        open_ = pending is not None and undone is None
        flags = torch.tensor([undone is not None, open_], dtype=torch.int64)
        any_undone, any_open = everyone.largest(flags, "the steps that are to be undone").tolist()
        if any_undone:
            self._take_back(undone)
        if undone is not None:
            undone.step_output.undo()
            self._forget()
            self._pending = None
        if is_ahead:
            assert undone is not None
            self._ended, step = self._ended - 1, None
            self._parts.pop()
            self._failure = _Failure(undone.settings.step, error)
        if any_open:
            entries = self._parts[-1].clone()
            table = self._end.table.shared(entries, "the verdict on the last step")
            if open_:
                self._judge(table)
                self.finish_skip(looks=False)
        self._end.drop_all_gradients()
        if step is None or self._failure is not None:
            return False
        self._failure = _Failure(step, error)
        return True

    def raise_failure(self) -> None:
        """Raises the error of a step that has failed. The step is not done."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            self._failed_step = failure.step
            failure.undo()
            raise self._explain(failure.error)

    def take_failed(self) -> int | None:
        """Returns the step whose error was raised last, once."""
        step, self._failed_step = self._failed_step, None
        return step

    def observed(self, result: StepRecord, failed: str | None) -> StepRecord:
        """Counts the verdict on a step, or what it would have been.

        The record has the switch of the barrier, which all ranks make alike.
        """
        if not self._enabled:
            return result
        self._recent.append(failed is not None)
        count, steps = sum(self._recent), len(self._recent)
        if self._has_no_barrier and count > _MOST:
            reason = f"{count} of the last {steps} steps were taken back"
        elif not self._has_no_barrier and steps == _WINDOW and count <= _FEW:
            reason = f"{count} of the last {steps} steps would have been taken back"
        else:
            return result
        self._has_no_barrier = not self._has_no_barrier
        return replace(result, switch=Switch(self._has_no_barrier, reason))

    def take_done(self) -> tuple[StepRecord, ...]:
        done, self._done = tuple(self._done), []
        return done

    def reshaped(self) -> None:
        """Makes a new ring, since the ranks are another mesh, or have met anew."""
        self.ring.close()
        self.ring = self._new_ring()

    def _new_ring(self) -> NormRing:
        store = self._store
        shape = store.layout.replicas, self._end.table.length
        return NormRing(store.world, store.layout.processes, shape)

    def renewed(self) -> None:
        """Starts anew after ranks have joined that know nothing of earlier steps."""
        self.reshaped()
        self._ended = 0
        self._parts.clear()
        self._recent.clear()
        self._has_no_barrier = self._enabled
