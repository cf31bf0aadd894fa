"""The end of a step without a barrier.

The step is made on what the ranks before know. It is pending until its verdict is in.

    end(step)     makes the step if the prefix has nothing against it, and tells the next rank;
                  then the next step begins
    its program   F F F ?   `is_validated` takes the verdict; a step that failed is taken back,
                  and made again if it only clips
    final         takes the verdict at once, before anything that reads or changes the model

`norm_ring.py` says how the table passes the ranks, and when there is a barrier again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NoReturn

from dynmo.errors import DynmoError, RunError
from dynmo.runtime.engine.executor import Executor, StepOutput
from dynmo.runtime.engine.norm_ring import (
    CLIPPED,
    MISMATCHED,
    NON_FINITE,
    BarrierPolicy,
    NormRing,
    Rollback,
)
from dynmo.runtime.engine.optimizer_step import OptimizerStep
from dynmo.runtime.engine.step_reduction import StepRecord
from dynmo.runtime.optim.parameter_groups import Rates
from dynmo.runtime.state.layer_store import LayerStore


@dataclass(frozen=True)
class _Pending:
    """A step whose verdict is still out. `stepped`: this rank has made it."""

    step: int
    step_output: StepOutput
    lr: Rates
    max_norm: float
    stepped: bool


class PostValidation:
    """Holds the last step until it is final, and results that nobody has taken yet."""

    def __init__(
        self,
        store: LayerStore,
        end: OptimizerStep,
        *,
        validates: bool,
        copies: bool,
        explain: Callable[[DynmoError], DynmoError],
    ) -> None:
        self._store, self._end, self._explain = store, end, explain
        self._policy = BarrierPolicy() if validates else None
        self._ring = self._new_ring()
        self._copies = copies
        self._pending: _Pending | None = None
        self._done: list[StepRecord] = []  # results that nobody has been given yet
        self._failure: DynmoError | None = None
        self._failed_step: int | None = None
        self._begun = 0.0  # when the program started that now runs

    @property
    def validates(self) -> bool:
        """Whether the next step has no barrier. A weight tied over two ranks needs one."""
        return self._policy is not None and self._policy.on and not self._store.tied.apart

    @property
    def copies(self) -> bool:
        """Whether optimizers keep copies, to take steps back."""
        return self._policy is not None and self._copies

    @property
    def is_out(self) -> bool:
        """Whether the verdict on a step is still out."""
        return self._pending is not None

    def begin(self) -> None:
        """Prepares for the program of a step that will be left pending."""
        if self._pending is None:
            self._ring.expect()
        self._begun = time.perf_counter()

    def is_validated(self, executor: Executor) -> bool:
        """Returns whether the next step's program may go on. Called in the middle of it."""
        is_validated = self._is_validated()
        if self._failure is None:
            self._ring.expect()
        executor.scale_loss(self._end.scaler.scale)  # no B has started
        return is_validated

    def end(
        self, step: int, step_output: StepOutput, lr: Rates, max_norm: float, flag: int
    ) -> None:
        """Makes the step if ranks so far have nothing against it, and tells the next."""
        if self._failure is not None:
            self._end.discard()
            self._raise()
        self._end.prepare()
        prefix = self._ring.prefix(self._end.table.own(step_output, flag))
        known = self._end.table.read(step, prefix, step_output, self._end.scaler.scale)
        # The norms alone decide: they are the same on all replicas, which must do alike. The
        # verdict finds a loss that is not finite.
        stepped = self._end.failed(0.0, known.squared_norms, max_norm) is None
        if stepped:
            if self._copies:
                for optimizer in self._store.optimizers.values():
                    optimizer.keep()
            # The step assumes that the global norm will not clip. A layer's own norm is known.
            self._end.apply(
                known.squared_norms, lr, max_norm if self._end.clip_scope == "local" else 0.0
            )
        self._ring.pass_on(self._end.table.complete(prefix) if self._ring.completes else prefix)
        self._pending = _Pending(step, step_output, lr, max_norm, stepped)
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
            self._is_validated()
            if self._failure is not None:
                self._raise()

    def assert_final(self) -> None:
        """Raises RunError while a step is pending, for calls on one rank alone."""
        if self._pending is not None:
            raise RunError(
                f"step {self._pending.step} may still be taken back; call drain() on all ranks "
                "first (a case: see Dynamism.acts)"
            )

    def _is_validated(self) -> bool:
        """Acts on the verdict. Returns False if the step was not made as assumed."""
        pending = self._pending
        assert pending is not None
        end = self._end
        table = self._ring.verdict()
        self._pending = None
        result = end.table.read(pending.step, table, pending.step_output, end.scaler.scale)
        failed = end.failed(result.loss, result.squared_norms, pending.max_norm)
        wrong = end.table.wrong_batch(pending.step, table)
        if wrong is not None:
            failed = MISMATCHED
        assert self._policy is not None
        switch = self._policy.observe(failed is not None)
        if failed is not None:
            if pending.stepped:
                end.each(
                    lambda _, optimizer: (
                        optimizer.restore() if self._copies else optimizer.invert(pending.lr)
                    )
                )
            if failed == CLIPPED:
                end.apply(result.squared_norms, pending.lr, pending.max_norm)
            if failed == NON_FINITE:
                self._failure = end.error(result)
                result = end.skipped(result)
            elif failed == MISMATCHED:
                self._failure = wrong
            result = replace(result, rollback=Rollback(failed, time.perf_counter() - self._begun))
        if self._failure is not None:
            self._failed_step = pending.step
        else:
            end.scaler.observe(failed != NON_FINITE)
        for optimizer in self._store.optimizers.values():
            optimizer.forget()
        end.drop_gradients()
        if self._failure is None:
            self._done.append(replace(result, switch=switch))
        return failed is None

    def _raise(self) -> NoReturn:
        failure, self._failure = self._failure, None
        assert failure is not None
        raise self._explain(failure)

    def take_failed(self) -> int | None:
        """Returns the step whose error was raised last, once. It has changed nothing."""
        step, self._failed_step = self._failed_step, None
        return step

    def observed(self, result: StepRecord, failed: str | None) -> StepRecord:
        """Records a step with a barrier as its verdict would have been, for the policy."""
        if self._policy is None:
            return result
        return replace(result, switch=self._policy.observe(failed is not None))

    def take_done(self) -> tuple[StepRecord, ...]:
        done, self._done = tuple(self._done), []
        return done

    def part(self) -> None:
        """Closes the ring before the ranks' groups end. No table may be under way."""
        self._ring.close()

    def reshaped(self) -> None:
        """Makes a new ring, since the ranks are another mesh."""
        self.part()
        self._ring = self._new_ring()

    def _new_ring(self) -> NormRing:
        store = self._store
        return NormRing(store.world, store.layout.processes, self._end.table.length)

    def renewed(self) -> None:
        """Starts anew after ranks have joined that know nothing of earlier steps."""
        self.reshaped()
        if self._policy is not None:
            self._policy = BarrierPolicy()
