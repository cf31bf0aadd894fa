"""Goes on without ranks that are gone, from copies in host memory.

    step      before it trains, the ranks copy their layers (`runtime/state/copies.py`)
    fault     the ranks that are left agree on who they are (`runtime/comm/survivors.py`),
              meet anew, hand the copies of a step to where its layers belong now, and make the
              engine anew, as a newcomer does
    journal   the calls since that step are made again, on the batches that they had

A call of the loop that fails by a fault is made again then. So the loop sees no fault.
"""

from __future__ import annotations

import gc
import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar, cast

from dynmo.change_events import RecoverEvent
from dynmo.elastic.manager import RankPlace
from dynmo.errors import ConfigError, InputError, RankDied, RunError, WaitTimeout
from dynmo.events import StepResult
from dynmo.models.group_placement import GroupPlacement
from dynmo.pipeline.assembly import make_engine
from dynmo.pipeline.goal import Cannot, find_goal, hand_over, layout_of
from dynmo.pipeline.journal import Call, Part, Reread, Training, on_host, rows_of, share_parts
from dynmo.pipeline.resizing import NextMesh, Resizing
from dynmo.pipeline.results import Evaluation
from dynmo.pipeline.roster import Roster
from dynmo.pipeline.saving import restore_state, state_of
from dynmo.plan.partition import Partition
from dynmo.runtime.comm.heartbeat import end_waits
from dynmo.runtime.comm.process_mesh import arrange
from dynmo.runtime.comm.waits import clear_frames, first_line
from dynmo.runtime.state.copies import Copies

if TYPE_CHECKING:
    from dynmo.pipeline.parts import Parts

_logger = logging.getLogger(__name__)

# Seconds in which the store must answer.
_ANSWER = 5.0
# Faults in a row without a step after which the run ends.
_MOST = 5

T = TypeVar("T")


class Recovery:
    """Keeps copies of a pipeline's layers, and goes on from them after a fault.

    Every rank has one and calls every method alike.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts, world = parts, parts.world
        if world.home is None:
            raise ConfigError(
                'elastic.recover = "memory" needs ranks that can meet anew, and those of a '
                "program's own process groups cannot; call dynmo.init before init_process_group"
            )
        self._world, self._home = world, world.home
        self._every = parts.options.elastic.recover_every
        self._check_alone()
        self._roster = Roster(world, world.home)
        # The generation and the mesh of the copies.
        self._copied_in: tuple[int, tuple[int, ...]] | None = None
        self._copies: Copies | None = None
        self._journal: list[Call] = []
        self._next = 0
        self._current: Call | None = None
        self._running: Call | None = None
        self._returned = -1  # the newest step whose result the loop has
        self._in_a_row = 0  # faults without a new step between them
        # Lowest and highest number of a call that some rank was in at the last fault.
        self._behind = self._ahead = 0
        self._rows: tuple[int, int] | None = None  # of the last batch here, and the replicas
        self._owed: list[StepResult] = []  # of steps that were repeated
        self._copied = self._farthest = -1  # the steps of the newest copy, and of the farthest one

    # -- calls -------------------------------------------------------------------------------------

    def call(self, run: Callable[[], T], *, changes: bool, has_results: bool = False) -> T:
        """Makes a call that all ranks make together, again after each fault."""
        if self._is_free:
            return run()
        return self._with_owed(self._make(Call(self._next, run, changes, has_results)))

    def _with_owed(self, result: Any) -> Any:
        """Returns the result of a call. Results of steps have those that were repeated, too."""
        if not isinstance(result, tuple):
            return result
        results = cast("tuple[Any, ...]", result)
        return self.news(results) if all(isinstance(x, StepResult) for x in results) else result

    def train(
        self, part: Part, stop: bool, adapt: bool, reread: Reread | None
    ) -> tuple[StepResult, ...]:
        """Trains on a batch like `Steps.train`, and keeps the batch."""
        # A load may have gone back.
        self._returned = min(self._returned, self._parts.steps.done - 1)
        if not self._is_free:
            self._check_rows(part)
        call = self._with_batch(part, changes=True)

        def run() -> tuple[StepResult, ...]:
            call.rates = call.rates or self._parts.steps.rates()
            given = self._part(call, part, reread)
            return self._parts.steps.train(given, stop, adapt, rates=call.rates)

        call.run = run
        return self.news(self._make(call))

    def evaluate(self, part: Part, count: int, shared: bool, **options: Any) -> Evaluation:
        """Evaluates on a batch of `count` microbatches like `Steps.evaluate`."""
        call = self._with_batch(part, changes=False)
        replicas = call.replicas

        def run() -> Evaluation:
            given = part if shared else self._part(call, part, None)
            now = replicas if shared else self._parts.engine.store.world.replicas
            return self._parts.steps.evaluate(
                given.inputs,
                given.targets,
                count * replicas // now,
                shared=shared,
                samples=given.samples,
                **options,
            )

        if self._is_free:
            return run()
        call.run = run
        return self._make(call)

    def _check_rows(self, part: Part) -> None:
        """Raises InputError if a batch was read ahead, for the replicas before a fault."""
        replicas, rows = self._parts.engine.store.world.replicas, rows_of(part.inputs)
        if rows is None:
            return
        before, self._rows = self._rows, (rows, replicas)
        if before is not None and before[1] != replicas and rows * replicas != math.prod(before):
            raise InputError(
                f"the batch has {rows} rows for one of {replicas} replicas, but before the mesh "
                f"changed each of {before[1]} had {before[0]}; a DataLoader has read it ahead for "
                "the mesh before, so make a new iterator after a fault, or read without workers"
            )

    def _with_batch(self, part: Part, *, changes: bool) -> Training:
        view = self._parts.engine.store.world
        kept = Part(on_host(part.inputs), on_host(part.targets), part.samples)
        parts = {view.replica: kept}
        return Training(
            self._next, lambda: (), changes, changes, replicas=view.replicas, parts=parts
        )

    def _part(self, call: Training, part: Part, reread: Reread | None) -> Part:
        """Returns the part of this rank's replica: what the loop gave, unless the mesh changed."""
        own = self._parts.engine.store.world
        given = part if call.is_new else call.part(own.replica, own.replicas)
        call.is_new = False
        if given is None and reread is not None:
            given = Part(*reread())
        if given is None:
            raise Cannot(
                f"no rank that is left has the batch of replica {own.replica}, so the step cannot "
                "be repeated; give step(reread=), or start the ranks anew, and resume"
            )
        return given

    def _make(self, call: Call) -> Any:
        self._next += 1
        if self._journal and not (call.changes or self._journal[-1].changes):
            # Only what some rank may not have done yet is done again.
            quiet = [each for each in self._journal[-3:-1] if not each.changes]
            self._journal = [each for each in self._journal if each not in quiet]
        self._journal.append(call)
        self._current = call
        try:
            while True:
                try:
                    return self._run(call)
                except (RankDied, WaitTimeout) as error:
                    self._survive(error, call)
        except _Left:
            if call.has_results:
                return ()
            raise RunError(
                "this rank has left the training; stop or call join() if pipeline.left is true"
            ) from None
        except BaseException:
            self._journal.remove(call)
            raise
        finally:
            self._current = None

    def _run(self, call: Call) -> Any:
        elastic, self._running = self._parts.changes.elastic, call
        if elastic is not None:
            # Others have made the call before, and a newcomer would not know of it.
            elastic.waits = call.number < self._ahead
        return call.run()

    def news(self, results: Sequence[StepResult]) -> tuple[StepResult, ...]:
        """Returns the results that the loop does not have yet."""
        known = {result.step: result for result in [*self._owed, *results]}
        new = tuple(known[step] for step in sorted(known) if step > self._returned)
        self._owed.clear()
        self._returned = max(known, default=self._returned)
        return new

    @property
    def _is_free(self) -> bool:
        """Whether a call is part of another one, or of a process that is no rank."""
        parts = self._parts
        return self._current is not None or parts.outside is not None or parts.changes.left

    def forget(self) -> None:
        """Forgets all, since this rank has left the run and may come back."""
        if self._copies is not None:
            self._copies.close()
        self._copies, self._copied_in, self._journal = None, None, []
        self._roster.places = []

    # -- copies ------------------------------------------------------------------------------------

    def before_acting(self, step: int) -> None:
        """Begins a copy before cases act before a step, if that is due."""
        self._copy(step, acts=True)
        if self._copies is not None and any(x.acts(step) for x in self._parts.changes.cases.all):
            self._copies.wait_copied()

    def before_training(self, step: int) -> None:
        """Begins a copy before a step, if that is due and there is none."""
        self._copy(step, acts=False)

    def _copy(self, step: int, *, acts: bool) -> None:
        call, world = self._running, self._world
        if call is None:
            return
        parts = self._parts
        elastic, shape = parts.changes.elastic, parts.engine.store.layout.shape
        if world.size == 1 and (elastic is None or not elastic.expects_ranks):
            self._journal, self._roster.places, self._copies = [call], [], None
            return  # nobody can go on for this rank
        is_new = self._copied_in != (world.generation, shape)
        if not is_new and (step % self._every or step == self._copied):
            return
        parts.steps.settle()
        if is_new:
            if self._copied_in is not None and self._copied_in[0] == world.generation:
                self.settle()  # the same ranks are another mesh
            self._count_ranks(call)
            parts.changes.cases.attach()
        assert self._copies is not None
        engine, changes, store = parts.engine, parts.changes, parts.engine.store
        spread = store.spread.placements
        extra: dict[str, Any] = {
            "step": step,
            "acts": acts,
            "shape": list(store.layout.shape),
            "microbatches": changes.options.all_microbatches,
            "spread": [[layer, each.holders] for layer, each in sorted(spread.items())],
        }
        moves = changes.rebalancer.moves
        state = state_of(engine, changes.cases.all, loss=changes.loss, moves=moves, extra=extra)
        self._copies.take(
            call.number,
            json.dumps(state),
            store.world.replica if spread else 0,
            ((i, store.modules[i], store.state(i, whole=not spread)) for i in sorted(store.layers)),
        )
        if step > self._farthest:
            self._farthest, self._in_a_row = step, 0
        self._copied = step
        engine.before_update = self._before_update
        first = min(self._copies.complete(), default=call.number)
        self._journal = [each for each in self._journal if each.number >= first]

    def _before_update(self) -> None:
        if self._copies is not None:
            self._copies.wait_copied()
            if (self._parts.steps.done + 1) % self._every == 0:
                self._copies.wait()

    def settle(self) -> None:
        """Waits until the newest copies are complete, before the ranks meet anew."""
        if self._copies is not None:
            self._copies.wait()

    @property
    def nbytes(self) -> int:
        """Bytes of the copies on this rank."""
        return 0 if self._copies is None else self._copies.nbytes

    def _check_alone(self) -> None:
        """Raises ConfigError if another pipeline of these ranks recovers, too."""
        if self._world.recovers:
            raise ConfigError(
                'a world has one pipeline with elastic.recover = "memory"; after a fault its ranks '
                "are others, of which the second one would not know"
            )

    def _count_ranks(self, call: Call) -> None:
        """Takes note of the ranks of a new generation."""
        world, store = self._world, self._parts.engine.store
        call.number = self._roster.count(call.number)
        self._next = max(self._next, call.number + 1)
        self._copied_in = world.generation, store.layout.shape
        if self._copies is not None:
            self._copies.close()
        shift = self._roster.shift(store.layout.replicas, is_spread=store.spreads_groups)
        target, source = ((world.rank + way) % world.size for way in (shift, -shift))
        ends = (target, source) if shift else (None, None)
        self._copies = Copies(world, *ends, self._copies)
        if shift and self._roster.shares_memory():
            self._copies.share_memory()
        world.channels.add(self._copies)

    # -- a fault -----------------------------------------------------------------------------------

    def _survive(self, error: RankDied | WaitTimeout, call: Call) -> None:
        """Goes back to a step that is complete, and makes the calls since then again."""
        while True:
            fault = not isinstance(error, RankDied) or error.is_fault
            # Without a count of the ranks nothing was copied yet.
            if not fault or not self._roster.places or self._in_a_row == _MOST:
                raise error
            self._in_a_row += 1
            try:
                self._go_on(error, call)
                return
            except (RankDied, WaitTimeout) as again:
                error = again

    def _go_on(self, error: RankDied | WaitTimeout, call: Call) -> None:
        begun, why = time.perf_counter(), first_line(error)
        parts, roster = self._parts, self._roster
        done, shape, size = parts.steps.done, parts.engine.store.layout.shape, len(roster.places)
        try:
            dead = self._meet(error)
            first = self._go_back(call, dead)
            why = roster.why(dead) or why
        except Cannot as hopeless:
            raise Cannot(f"{why}; {first_line(hopeless)}") from error
        step, layout = parts.steps.done, parts.engine.store.layout
        names = tuple(map(str, dead))
        event = RecoverEvent(
            step,
            lost=names,
            why=why,
            seconds=time.perf_counter() - begun,
            repeated=max(0, done - step),
            ranks_before=size,
            ranks_after=self._world.size,
            source=shape,
            target=layout.shape,
            layers=layout.partition.counts,
        )
        parts.tell(event)
        if self._world.leads:
            _logger.warning(f"{why}; the run goes on without {', '.join(names) or 'it'}")
        repeats = [each for each in self._journal if first <= each.number < call.number]
        for each in repeats:
            if each.changes or each.number >= self._behind:
                result = self._run(each)
                if isinstance(result, tuple):
                    known = cast("tuple[object, ...]", result)
                    self._owed += [x for x in known if isinstance(x, StepResult)]

    def _meet(self, error: RankDied | WaitTimeout) -> list[RankPlace]:
        """Meets the ranks that are left. Returns where the others have run."""
        parts, world = self._parts, self._world
        if world.group is not None and world.size > 1:
            end_waits(world.group)  # the threads of channels, too
        engine = parts.engine
        engine.programs.relower()
        engine.pending.ring.drop()
        engine.store.replicas.close()
        parts.saves.drop()
        clear_frames(error)
        gc.collect()
        return self._roster.meet(error)

    def _go_back(self, call: Call, dead: Sequence[RankPlace]) -> int:
        """Makes the engine anew, from a copy that is complete.

        Returns the number of the call that began with it.
        """
        parts, world, before = self._parts, self._world, self._parts.changes
        assert self._copies is not None, "the ranks were counted"
        first = min(each.number for each in self._journal)
        goal = find_goal(world, self._copies, parts.model.layers, call.number, first)
        self._behind, self._ahead = goal.behind, goal.ahead
        layout = layout_of(goal, goal.able, before.options, parts.engine)
        parts.engine.store.empty()
        arrivals = hand_over(world, goal, self._copies, layout)
        ranks = layout.ranks * layout.replicas
        left = [*dead, *self._roster.places[ranks:]]
        if ranks < world.size:
            self._part_with_others(ranks)
        options = before.options
        if goal.state["microbatches"] != options.all_microbatches:
            options = options.with_microbatches(goal.state["microbatches"])
        groups = {
            layer: GroupPlacement(tuple(map(tuple, each)), options.expert)
            for layer, each in goal.state["spread"]
        }
        shape = layout.ranks, layout.replicas
        parts.options = options
        mesh = arrange(world, layout.replicas)
        engine = parts.engine = make_engine(
            options, mesh, parts.model, layout.partition, shape, layout.schedule, parts.engine
        )
        restore_state(engine, goal.state, parts.cases)
        Resizing(engine).take_up(arrivals, groups or None)
        if world.leads:  # a rank 0 that is gone does not say it
            with suppress(RuntimeError):  # the next call finds that the store is lost
                self._home.set(f"log closed/{world.generation - 1}", "1")
        loss, step = goal.state["loss"], goal.state["step"]
        self._owed += [result for result in parts.steps.take() if result.step < step]
        parts.begin_at(step, math.nan if loss is None else loss, goal.state["moves"])
        changes = parts.changes
        changes.made_before(step, acts=goal.state["acts"])
        changes.elastic = before.elastic
        if before.tracer is not None:
            changes.tracer = parts.new_tracer()  # a trace has passes of all ranks
        changes.cases.skipped = before.cases.skipped
        changes.cases.attach()
        if changes.elastic is not None:
            pipeline, replicas = goal.state["shape"]
            former = NextMesh(
                pipeline,
                replicas,
                Partition(tuple(goal.state["partition"])),
                goal.state["microbatches"],
                "ranks came in place of those that were lost",
            )
            changes.elastic.recovered(
                engine, changes.rebalancer, options, self._roster.places, left, former
            )
        held = [each for each in self._journal if isinstance(each, Training)]
        self._share([each for each in held if each.number >= goal.number])
        self._copied, self._copied_in = -1, None
        return goal.number

    def _share(self, calls: Sequence[Training]) -> None:
        own = self._parts.engine.store.world
        share_parts(own, calls, own.replica, own.replicas)

    def _part_with_others(self, ranks: int) -> None:
        """Leaves ranks out that no mesh has a place for. They wait to be called."""
        world, elastic = self._world, self._parts.changes.elastic
        if self._roster.keep(ranks):
            return
        assert elastic is not None, "a run that recovers may change its ranks"
        world.leave()
        elastic.left = True
        raise _Left


class _Left(Exception):
    """This rank has no place in the mesh of those that are left."""
