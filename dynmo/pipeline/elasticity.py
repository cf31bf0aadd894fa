"""Decides before a step how many ranks a run has, and changes the ranks.

    rank 0    looks for processes that wait to join, and asks the manager (`elastic/newcomers.py`)
    all       see in a step's flags that rank 0 wants a decision, decide alike, shrink or grow

Rank 0 may leave, too. The lowest rank that stays becomes rank 0 and takes over.

A planned mesh (`elastic.reshape_at`) is followed at its step. `elastic.repack` and
`elastic.target_ranks` ask the planner. Without these, newcomers are taken if they make the run
faster.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from dynmo.change_events import GrowEvent, RepackEvent
from dynmo.elastic.manager import RankPlace, count_text, own_place
from dynmo.elastic.newcomer import NewcomerState
from dynmo.elastic.newcomers import Handover, Newcomers
from dynmo.errors import NoRoomError
from dynmo.events import Event, FaultEvent
from dynmo.models.identity import Identity
from dynmo.pipeline.assembly import first_partition
from dynmo.pipeline.cases import CaseContext
from dynmo.pipeline.gathering import rules_of
from dynmo.pipeline.options import PipelineOptions
from dynmo.pipeline.rebalance import Rebalancer
from dynmo.pipeline.resizing import NextMesh, ResizeFailed, Resizing
from dynmo.pipeline.results import STOP
from dynmo.plan.partition import Partition, kept_ranks
from dynmo.runtime.comm.agreement import share_texts
from dynmo.runtime.comm.meeting import meeting_of
from dynmo.runtime.comm.rank_group import RankGroup
from dynmo.runtime.engine.engine import Engine
from dynmo.runtime.state.migration import Migration
from dynmo.signals import is_asked_to_stop

# Bit of a step's flag: rank 0 wants all ranks to decide.
LOOK = 2
# Most seconds for which rank 0 waits for newcomers before it tells the other ranks how many came.
_PIECE = 1.0
# Growths that may fail in a row before no other ranks are asked for, in place of lost ones.
_MOST_FAILURES = 3


class Elasticity:
    """Changes the number of ranks.

    Every rank of a run has one and calls every method alike.
    """

    def __init__(
        self,
        options: PipelineOptions,
        pipeline: Engine,
        rebalancer: Rebalancer,
        identity: Identity,
        reference: float | None = None,
        newcomer: NewcomerState | None = None,
    ) -> None:
        self.options, self._pipeline, self._rebalancer = options, pipeline, rebalancer
        self._identity, self.reference = identity, reference
        self._newcomers: Newcomers | None = None
        self._open_entrance(None)
        self._must_decide = False  # rank 0 wants to decide
        self._stops = False  # the training ends, of which a newcomer would not know
        # A planned mesh whose newcomers did not come.
        self._postponed = None if newcomer is None else newcomer.postponed
        self._wanted_ranks: int | None = None  # number of ranks that the planner would like
        self._refused = 0  # newcomers that would not make the run faster
        self._most_ranks = max(options.world_size, self._everyone.size)
        self._given_up = 0  # slow ranks that left, which the run does not ask for again
        # GPU-seconds that ranks were away, until `_since`.
        self._returned, self._since = 0.0, time.monotonic()
        self._events: list[Event] = []
        # The mesh before a fault, to which the run goes back while it has fewer ranks.
        self._former: NextMesh | None = None
        if newcomer is not None and newcomer.former is not None:
            ranks, replicas, counts, microbatches, reason = newcomer.former
            self._former = NextMesh(ranks, replicas, Partition(counts), microbatches, reason)
        self._failures = 0  # growths that failed in a row
        # Generation in which ranks have joined last. 0 if none has since the last fault.
        self.grown = 0
        # Whether no newcomer may come now.
        self.waits = False
        # True if this rank is out of the run.
        self.left = False

    def go_on(self, rebalancer: Rebalancer, reference: float | None) -> None:
        """Takes up the measurements of a loaded checkpoint."""
        self._rebalancer, self.reference = rebalancer, reference

    def _open_entrance(self, former: Handover | None, after_fault: bool = False) -> None:
        world = meeting_of(self._everyone)
        if world.leads and world.home is not None:
            self._newcomers = Newcomers(self.options.elastic, world, self._identity, former)
            if after_fault:
                self._newcomers.go_on()

    def recovered(
        self,
        engine: Engine,
        rebalancer: Rebalancer,
        options: PipelineOptions,
        stay: Sequence[RankPlace],
        left: Sequence[RankPlace],
        former: NextMesh,
    ) -> None:
        """Goes on with a new engine after a fault, and asks for ranks in place of those that left.

        Args:
            stay: Where the ranks run.
            left: Where the others have run.
            former: The mesh before.
        """
        everyone = meeting_of(engine.store.world)
        moment = time.monotonic()
        self._returned += (self._most_ranks - len(stay) - len(left)) * (moment - self._since)
        self._since, self._pipeline, self._rebalancer = moment, engine, rebalancer
        self.options, self._must_decide, self._refused, self.waits = options, False, 0, False
        # Only some of these ranks may have come to a change of the last steps.
        self._stops, self.grown = False, 0
        if self._former is None or former.ranks >= self._former.ranks:
            self._former = former
        lost = self._lost_mesh
        self._postponed = None if lost is None else lost.shape
        if not everyone.leads:
            return
        if self._newcomers is None:
            self._open_entrance(Handover(), after_fault=True)
        assert self._newcomers is not None
        self._newcomers.on_resize(stay, left)
        if lost is not None:
            self._newcomers.start(lost.ranks - everyone.size - self._newcomers.waiting)

    @property
    def expects_ranks(self) -> bool:
        """Whether ranks are missing after a fault."""
        return self._lost_mesh is not None

    @property
    def _lost_mesh(self) -> NextMesh | None:
        """The mesh before a fault, while ranks are missing for it."""
        former = self._former
        return former if former is not None and former.ranks > self._everyone.size else None

    @property
    def _everyone(self) -> RankGroup:
        return self._pipeline.store.world.everyone

    @property
    def gpu_seconds_returned(self) -> float:
        """GPU-seconds so far of the ranks that the run did without."""
        return self._returned + (self._most_ranks - self._everyone.size) * (
            time.monotonic() - self._since
        )

    def take_events(self, step: int) -> list[Event]:
        """Returns the events since the last call, on rank 0."""
        if self.left:
            return []
        events, self._events = self._events, []
        return [*(() if self._newcomers is None else self._newcomers.take_events(step)), *events]

    def close(self) -> None:
        """Tells all waiting processes that the run is over, unless another rank 0 goes on."""
        if self._newcomers is not None:
            self._newcomers.close(self.left)

    # -- hearing -----------------------------------------------------------------------------------

    def step_flag(self) -> int:
        """Returns this rank's part of the next flag: LOOK if all ranks shall decide."""
        return (
            LOOK if self._newcomers is not None and self._is_welcome(self._newcomers.look()) else 0
        )

    def _is_welcome(self, waiting: int) -> bool:
        elastic, size = self.options.elastic, self._everyone.size
        lost = self._lost_mesh
        if lost is not None and size + waiting >= lost.ranks:
            return True
        if not waiting:
            self._refused = 0
            return False
        if elastic.reshape_at:
            return (
                self._postponed is not None
                and size + waiting >= self._postponed[0] * self._postponed[1]
            )
        if elastic.target_ranks is not None:
            return size < elastic.target_ranks and waiting > self._refused
        if elastic.repack:
            wanted = size if self._wanted_ranks is None else self._wanted_ranks
            return (wanted > size or self._given_up > 0) and waiting > self._refused
        return waiting > self._refused and self._rebalancer.measured

    def take_flags(self, flags: Sequence[int]) -> None:
        """Takes the flags of a step's result."""
        self._must_decide = self._must_decide or any(flag & LOOK for flag in flags)
        self._stops = any(flag & STOP for flag in flags)

    def acts(self, step: int) -> bool:
        """Returns True if it may change the ranks before a step."""
        return not (self._stops or self.waits) and (
            self._must_decide
            or self._is_planned(step)
            or (self.options.elastic.changes_ranks and self._rebalancer.is_due(step))
        )

    def _is_planned(self, step: int) -> bool:
        shape = self.options.shape_at(step)
        return (
            bool(self.options.elastic.reshape_at)
            and shape[0] * shape[1] != self._everyone.size
            and shape != self._postponed
        )

    # -- deciding ----------------------------------------------------------------------------------

    def change(self, step: int, state: Callable[[], dict[str, Any]]) -> bool:
        """Changes the ranks before a step, if that is called for."""
        if not self.acts(step):
            return False
        self._must_decide, size = False, self._everyone.size
        lost = self._lost_mesh
        if lost is not None and size + self._known_to_first()[0] >= lost.ranks:
            return self._grow(step, lost, state)
        mesh = self._planned(step) if self.options.elastic.reshape_at else self._ask_planner(step)
        if mesh is None or mesh.ranks == size:
            return False
        return self._shrink(step, mesh) if mesh.ranks < size else self._grow(step, mesh, state)

    def _planned(self, step: int) -> NextMesh | None:
        """Returns the config's mesh for this step, unless its newcomers do not come."""
        shape = self.options.shape_at(step)
        missing = shape[0] * shape[1] - self._everyone.size
        if missing > 0 and self._await_newcomers(step, missing) < missing:
            self._postponed = shape
            return None
        self._postponed = None
        partition = first_partition(self.options, self._pipeline.model.layers, shape[0])
        return NextMesh(*shape, partition, self.options.all_microbatches, "planned")

    def _ask_planner(self, step: int) -> NextMesh | None:
        if not self._rebalancer.measured:
            return None
        elastic, size = self.options.elastic, self._everyone.size
        waiting, most, _ = self._known_to_first()
        available = size + waiting
        nodes = _nodes(self._places())
        rules = rules_of(self.options, self._pipeline, "ranks")
        rules = replace(rules, available_ranks=available, most_ranks=most)
        decision = self._rebalancer.decide(step, rules, nodes, self.reference)
        self._tell(*self._rebalancer.take_news())
        if decision.refusal is not None:  # the wish cannot be met with the present layers
            self._tell(FaultEvent(step, f"the run keeps its {size} ranks: {decision.refusal}"))
            return None
        self.reference, self._wanted_ranks = decision.reference, decision.ranks
        if self._newcomers is not None and elastic.changes_ranks and decision.ranks > available:
            self._newcomers.start(decision.ranks - size - self._newcomers.waiting)
        self._refused = available - size
        if not decision.verdict.pays:
            return None
        mesh = decision.plan.mesh
        microbatches = mesh.microbatches * mesh.replicas
        return NextMesh(
            mesh.pipeline,
            mesh.replicas,
            decision.plan.partition,
            microbatches,
            decision.verdict.reason,
            decision.verdict.gain,
        )

    def _await_newcomers(self, step: int, missing: int) -> int:
        """Waits until all missing newcomers are there. Returns the number of present ones."""
        world, join_timeout = self._everyone, self.options.elastic.join_timeout
        start = time.monotonic()
        if self._newcomers is not None and self._newcomers.look(at_once=True) < missing:
            self._newcomers.start(missing - self._newcomers.waiting)
        # The other ranks wait for rank 0 as long as for any message, so it answers in between.
        piece, waiting, is_over = min(_PIECE, world.timeout / 4), 0, False
        while waiting < missing and not is_over:
            now = time.monotonic()
            end = min(now + piece, start + join_timeout)
            if self._newcomers is not None:
                while self._newcomers.look(at_once=True) < missing and time.monotonic() < end:
                    time.sleep(0.02)
            is_late = self._newcomers is not None and time.monotonic() >= start + join_timeout
            waiting, _, is_over = self._known_to_first(is_late or is_asked_to_stop())
        if waiting < missing:
            if self._newcomers is not None:
                self._newcomers.miss()
            waited = min(join_timeout, round(time.monotonic() - start, 1))
            came = f"waited {waited:g} s for {count_text(missing)} (dynmo train --join)"
            goes_on = f"the run goes on with {world.size}, and takes the others when they come"
            self._tell(FaultEvent(step, f"{came}, and {waiting} came; {goes_on}"))
        return waiting

    def _known_to_first(self, is_over: bool = False) -> tuple[int, int, bool]:
        """Returns how many newcomers wait, and the most ranks to ask for, as rank 0 knows them.

        Also returns whether `is_over` holds on some rank.
        """
        waiting = 0 if self._newcomers is None else self._newcomers.waiting
        most = 0 if self._everyone.rank else self._most_ranks - self._given_up
        table = self._everyone.sum(
            torch.tensor([waiting, most, int(is_over)]), "rank 0 to say who waits to join"
        )
        return int(table[0]), int(table[1]), bool(table[2])

    def _places(self) -> list[RankPlace]:
        world = self._everyone
        text = json.dumps(asdict(own_place(world.rank)))
        texts = share_texts(world, text, "where all ranks run")
        return [RankPlace(**json.loads(each)) for each in texts]

    # -- acting ------------------------------------------------------------------------------------

    def _shrink(self, step: int, mesh: NextMesh) -> bool:
        pipeline, start = self._pipeline, time.perf_counter()
        rank, before = self._everyone.rank, (self._everyone.size, pipeline.store.layout.shape)
        places, slow = self._places(), self._pipeline.speeds.lasting
        staying = self._staying_ranks(_nodes(places), mesh)
        handed = "" if 0 in staying else self._hand_over()
        try:
            migration = Resizing(pipeline).shrink(staying, mesh)
        except (NoRoomError, ResizeFailed) as error:
            self._postponed = mesh.shape
            self._tell(FaultEvent(step, f"the run keeps its {len(places)} ranks: {error}"))
            return False
        self.left = rank not in staying
        if self.left:
            return True
        if handed:
            self._take_over(handed)
        left = [place for place in places if place.rank not in staying]
        self._given_up += sum(place.rank in slow for place in left)
        if self._newcomers is not None:
            self._newcomers.on_resize([places[rank] for rank in staying], left)
        slowdown, names = None if mesh.gain is None else -mesh.gain, tuple(map(str, left))
        event = partial(RepackEvent, predicted_slowdown=slowdown, left=names)
        self._on_resize(step, mesh, before, migration, start, event)
        return True

    def _hand_over(self) -> str:
        """Returns what the next rank 0 must know of this one, on every rank."""
        known = None if self._newcomers is None else asdict(self._newcomers.handover())
        given = json.dumps([self.gpu_seconds_returned, self._most_ranks, self._given_up, known])
        return share_texts(self._everyone, given, "rank 0 to hand over")[0]

    def _take_over(self, given: str) -> None:
        self._returned, self._most_ranks, self._given_up, known = json.loads(given)
        self._since = time.monotonic()
        self._open_entrance(None if known is None else Handover(**known))

    def _on_resize(
        self,
        step: int,
        mesh: NextMesh,
        before: tuple[int, tuple[int, ...]],
        migration: Migration,
        start: float,
        event: Callable[..., Event],
    ) -> None:
        """Counts, takes up the mesh's microbatches, and tells. `before` is the former size."""
        seconds, size = time.perf_counter() - start, self.options.samples
        if mesh.microbatches != self.options.all_microbatches:
            self.options = self.options.with_microbatches(mesh.microbatches)
            self._rebalancer.use(self.options)
        moment = time.monotonic()
        self._returned += (self._most_ranks - before[0]) * (moment - self._since)
        self._since, self._most_ranks = moment, max(self._most_ranks, mesh.ranks)
        self._given_up = min(self._given_up, self._most_ranks - mesh.ranks)
        self._wanted_ranks, self._refused, self._must_decide = None, 0, False
        if mesh.ranks < before[0]:
            self._former = None
        number, result = self._rebalancer.on_resize(step, mesh.gain, seconds)
        change = event(
            step,
            id=number,
            ranks_before=before[0],
            ranks_after=mesh.ranks,
            source=before[1],
            target=mesh.shape,
            micro_batch=(size, self.options.samples),
            layers=mesh.partition.counts,
            moved_bytes=migration.moved_bytes,
            seconds=seconds,
            reason=mesh.reason,
        )
        self._tell(result, change)

    def _staying_ranks(self, nodes: Sequence[str], mesh: NextMesh) -> tuple[int, ...]:
        speeds = self._pipeline.speeds.of_ranks()
        if self.options.expert == 1:
            return kept_ranks(nodes, mesh.ranks, speeds)
        # Replicas hold different weights, so they stay together.
        replicas = mesh.shape[1]
        if speeds is not None:
            speeds = tuple(min(speeds[i : i + replicas]) for i in range(0, len(nodes), replicas))
        positions = kept_ranks(nodes[::replicas], mesh.shape[0], speeds)
        return tuple(
            position * replicas + replica for position in positions for replica in range(replicas)
        )

    def _grow(self, step: int, mesh: NextMesh, state: Callable[[], dict[str, Any]]) -> bool:
        pipeline, start = self._pipeline, time.perf_counter()
        before = (self._everyone.size, pipeline.store.layout.shape)
        joined = self._let_in(step, mesh, state())
        try:
            migration = Resizing(pipeline).grow(
                mesh.ranks - before[0], mesh, self.options.elastic.join_timeout
            )
        except ResizeFailed as error:
            self._postponed = mesh.shape
            self._rebalancer.on_resize(step, None)
            self._tell(FaultEvent(step, str(error)))
            self._failures += 1
            lost = self._lost_mesh
            if self._newcomers is not None and lost is not None and self._failures < _MOST_FAILURES:
                self._newcomers.start(lost.ranks - before[0] - self._newcomers.waiting)
            return True
        self._failures, self.grown = 0, self._everyone.generation
        if self._newcomers is not None:
            self._newcomers.on_resize([*self._places_before, *joined])
        names = tuple(map(str, joined))

        def event(step: int, **rest: Any) -> Event:
            returned = self.gpu_seconds_returned
            return GrowEvent(
                step, predicted_gain=mesh.gain, joined=names, gpu_seconds_returned=returned, **rest
            )

        self._on_resize(step, mesh, before, migration, start, event)
        return True

    def _let_in(self, step: int, mesh: NextMesh, state: dict[str, Any]) -> list[RankPlace]:
        """Lets the newcomers of a mesh in, on rank 0. Returns where they run."""
        self._places_before = self._places()
        if self._newcomers is None:
            return []
        pipeline, size, lost = self._pipeline, self._everyone.size, self._former
        layout, spread = pipeline.store.layout, CaseContext(pipeline).spread
        groups = {} if spread is None else spread.placements
        message = NewcomerState(
            rank=size,
            generation=self._everyone.generation + 1,
            step=step,
            shape=mesh.shape,
            layers=mesh.partition.counts,
            shape_before=(layout.shape[0], layout.shape[1]),
            layers_before=layout.partition.counts,
            state=state,
            costs=pipeline.schedule_maker.known,
            reference=self.reference,
            microbatches=mesh.microbatches,
            former=None
            if lost is None
            else (*lost.shape, lost.partition.counts, lost.microbatches, lost.reason),
            postponed=self._postponed,
            groups=tuple((layer, each.holders) for layer, each in sorted(groups.items())),
        )
        ranks = range(size, mesh.ranks)
        return self._newcomers.let_in(
            [message.model_copy(update={"rank": rank}).to_text() for rank in ranks]
        )

    def _tell(self, *events: Event | None) -> None:
        self._events += [event for event in events if event is not None]


def _nodes(places: Sequence[RankPlace]) -> list[str]:
    """Returns the machine of each rank, for `kept_ranks`."""
    stay = {place.node for place in places if place.stays}
    if len({place.process is None for place in places}) > 1:
        # The launcher, and the store with it, ends with the last rank that it has started.
        stay.add(places[0].node)
    return ["" if place.node in stay else place.node for place in places]
