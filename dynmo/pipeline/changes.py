"""What changes between two steps of a pipeline: ranks, mesh, places of layers, and cases.

Every rank makes the same changes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dynmo.change_events import ChangeEvent, TokensEvent
from dynmo.errors import RunError
from dynmo.events import Event, PostValidationEvent
from dynmo.pipeline.actions import Actions
from dynmo.pipeline.assembly import first_partition
from dynmo.pipeline.case import TokenShares
from dynmo.pipeline.cases import Cases
from dynmo.pipeline.options import PipelineOptions
from dynmo.pipeline.rebalance import Rebalancer
from dynmo.pipeline.saving import state_of
from dynmo.plan.partition import Partition
from dynmo.runtime.engine.engine import Engine
from dynmo.schedule.bounds import Objective

if TYPE_CHECKING:
    from dynmo.pipeline.elasticity import Elasticity
    from dynmo.pipeline.trace import Tracer


class Changes:
    """Makes the changes before a step.

    Args:
        emit: Called with the events.
        own_state: Returns what a newcomer gets beside: the optimizer's groups, as schedulers have
            changed them, and what the user's program keeps in `Pipeline.extra`.
        joins_at: The step before which this rank has joined. It takes part from the cases' own part
            of that step on.

    Attributes:
        options: Options of the pipeline as they are now.
        loss: That of the last final step whose loss and gradient were finite.
        elastic: Changes the number of ranks. None if that is not wanted.
        tracer: Records the ops. None if that is not wanted.
        token_shares: What each case has counted last, by its name.
        before_acting: Called before the cases act before a step.
        made: The step before which all changes were made.
    """

    def __init__(
        self,
        options: PipelineOptions,
        engine: Engine,
        cases: Cases,
        rebalancer: Rebalancer,
        emit: Callable[..., None],
        own_state: Callable[[], dict[str, Any]],
        loss: float,
        joins_at: int | None = None,
    ) -> None:
        self.options, self._engine, self.cases = options, engine, cases
        self.rebalancer, self._emit, self._own_state = rebalancer, emit, own_state
        self.loss = loss
        self.elastic: Elasticity | None = None
        self.tracer: Tracer | None = None
        self.token_shares: dict[str, TokenShares] = {}
        self._joins_at = joins_at
        self.before_acting: Callable[[int], None] = lambda _: None
        self.made: int | None = None
        self._placed: int | None = None  # the step before which ranks and layers were
        self._barrier_stays = False  # although the options ask for none

    @property
    def left(self) -> bool:
        return self.elastic is not None and self.elastic.left

    def are_due(self, step: int) -> bool:
        """Returns True if something may change or read the model before this step."""
        return (
            self.rebalancer.should_check(step)
            or (self.elastic is not None and self.elastic.acts(step))
            or any(case.acts(step) for case in self.cases.all)
        )

    def make(self, step: int) -> None:
        """Changes ranks, mesh and placement, and lets the cases act."""
        if self._placed != step:
            self.rebalancer.records.clear()
            if step != self._joins_at:
                self._collect(step)
                if self.elastic is not None:
                    self._resize(self.elastic, step)
            if not self.left:
                self._reshape(step)
                if self.rebalancer.is_due(step):
                    self.consider(step)
                self._placed = step
        if not self.left:
            self.before_acting(step)
            self._act(step)
        self.made = step

    def made_before(self, step: int, *, acts: bool) -> None:
        """Takes note that the engine is as it was after the changes before a step.

        Args:
            acts: Whether the cases have still to act.
        """
        self._placed, self.made = step, None if acts else step

    def _collect(self, step: int) -> None:
        with self._all_cases(step):
            for case, shares in self.cases.collect(step):
                self.token_shares[case.name] = shares
                self._emit(TokensEvent(step, case.name, shares.layers, shares.shares))

    def _act(self, step: int) -> None:
        with self._all_cases(step):
            for case, change in self.cases.act(step):
                self._emit(self.rebalancer.on_workload_change(step))
                self._keep_trace()
                is_own_case = case.name not in {each.name for each in self.options.cases}
                options = {} if is_own_case else change.options
                self._emit(ChangeEvent(step, case.name, change.layers, change.what, options))

    @contextmanager
    def _all_cases(self, step: int) -> Generator[None]:
        """Has all ranks raise the error of a case on one of them. The next call tries it again."""
        with self._engine.attempt():
            yield
            if any(case.acts(step) for case in self.cases.all):
                self.cases.follow_rebuilt()

    def consider(self, step: int, ahead: bool = True) -> None:
        """Decides on the placement, and moves layers."""
        self._tell_move(self.rebalancer.consider(step, ahead))

    def end_move(self, step: int) -> None:
        """Tells of layers that have moved while the step before `step` ran."""
        self._tell_move(self.rebalancer.end_move(step))

    def _tell_move(self, events: Sequence[Event]) -> None:
        for event in events:
            self._emit(event)
            self._keep_trace()

    def move(self, step: int, partition: Partition | None, schedule: str | None) -> bool:
        """Moves layers, or decides whether to. Returns whether the placement is another one now."""
        store = self._engine.store
        before = store.layout.partition
        if partition is not None or schedule is not None:
            Actions(self._engine).move(partition or before, schedule)
        elif self.rebalancer.measured:
            self.consider(step, ahead=False)
        else:
            raise RunError(
                "move was called without a placement before a step was measured; train at "
                "least one step first, or give the number of layers on each stage"
            )
        return store.layout.partition != before

    def freeze(self, step: int, layers: Collection[int]) -> None:
        Actions(self._engine).freeze(layers)
        self._emit(self.rebalancer.on_workload_change(step))

    def unfreeze(self, step: int, layers: Collection[int]) -> None:
        Actions(self._engine).unfreeze(layers)
        self._emit(self.rebalancer.on_workload_change(step))

    def _resize(self, elastic: Elasticity, step: int) -> None:
        def state() -> dict[str, Any]:
            return state_of(
                self._engine,
                self.cases.all,
                loss=self.loss,
                moves=self.rebalancer.moves + 1,
                extra=self._own_state(),
            )

        size = self._engine.store.world.everyone.size
        self._emit(*elastic.take_events(step))  # rank 0 may leave now
        if elastic.change(step, state) and not elastic.left:
            self.options = elastic.options
            if self.tracer is not None and self._engine.store.world.everyone.size > size:
                self.tracer.renew()
            self._keep_trace()
            self.tell_barrier(step)
        self._emit(*elastic.take_events(step))

    def _reshape(self, step: int) -> None:
        """Makes the same ranks another mesh, if that is decided or planned."""
        engine, options = self._engine, self.options
        shape, mesh = options.shape_at(step), None
        if options.elastic.reshape:
            mesh = self.rebalancer.mesh(step) if self.rebalancer.is_due(step) else None
        elif (
            options.elastic.reshape_at
            and shape != engine.store.layout.shape
            and shape[0] * shape[1] == engine.store.world.everyone.size
        ):
            mesh = (*shape, first_partition(options, engine.model.layers, shape[0]))
        if mesh is not None:
            self.reshape(step, *mesh)

    def reshape(self, step: int, pipeline: int, replicas: int, partition: Partition) -> None:
        before = self._engine.store.layout.shape
        self._emit(*self.rebalancer.reshape(step, pipeline, replicas, partition))
        if self._engine.store.layout.shape != before:
            self._keep_trace()
            self.tell_barrier(step)

    def _keep_trace(self) -> None:
        if self.tracer is not None:
            self.tracer.keep_around()

    def tell_barrier(self, step: int) -> None:
        """Reports if post-validation is not possible although the options ask for it.

        A weight tied over two ranks gets its gradient from both, so the barrier stays. A mesh that
        has the weight on one rank needs no barrier.
        """
        stays = (
            self.options.post_validation
            and self._engine.schedule_maker.objective is Objective.MAKESPAN
        )
        if stays != self._barrier_stays:
            self._barrier_stays = stays
            reason = f"the layers of a tied weight are on {'two ranks' if stays else 'one rank'}"
            self._emit(PostValidationEvent(step, not stays, reason))
