"""The local search of `placement`, for layers whose recomputation is chosen."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise, product
from typing import final

import numpy as np

from dynmo.errors import NoRoomError, ScheduleError
from dynmo.plan._replay_kernels import promising, replay
from dynmo.plan.bisection import exact, ties
from dynmo.plan.chunks import chunked, flowing
from dynmo.plan.evaluate import Plan, Replica, evaluate
from dynmo.plan.partition import Partition, uniform, weigh
from dynmo.plan.problem import Choice
from dynmo.plan.recompute import with_recompute
from dynmo.schedule.bounds import Objective, lower_bound
from dynmo.schedule.catalogue import make
from dynmo.schedule.graph import Floats
from dynmo.schedule.memory import MemoryLimits, Pairs
from dynmo.schedule.op import Schedule
from dynmo.schedule.simulator import resident

Bounds = tuple[int, ...]

# Times nearer than this share count as equal, because sums in another order differ by as much. The
# fewer bytes moved decide then.
_SAME = 1e-9
# The most ops of the plans that are tried by their true bytes.
_TRIES, _QUICK_TRIES = 600_000, 30_000
_STARTS = 3  # placements from which a round descends, for each stage of a rank
_ROUNDS = 3  # the most times that the schedule is made anew for the best placement
_FITTING_ROUNDS = 6  # the same, if the memory is short
# Ops replayed in one round: some tenths of a second. With several stages per rank the schedule of a
# placement decides more than its order under another's schedule.
_OPS, _OPS_OF_SEVERAL = 40_000_000, 5_000_000


@final
class LocalSearch:
    def __init__(
        self, replica: Replica, current: Partition | None, recomputed: frozenset[int]
    ) -> None:
        self.replica, self.recomputed = replica, recomputed
        self.stage_ranks, self.ranks = replica.stage_ranks, replica.mesh.pipeline
        self.stages, self.rank_of = len(self.stage_ranks), np.array(self.stage_ranks, np.int64)
        # Layers that are nowhere yet count as placed evenly, but need not stay near.
        self.anew = current is None and replica.problem.profile.partition is None
        if current is None or current.stages != self.stages:
            current = replica.current
        self.current = current
        self.even = uniform(len(replica.layers), self.stages)
        self.layers = with_recompute(replica.layers, recomputed)
        speeds = replica.problem.speeds
        self.rates, self.speeds = speeds, replica.speeds
        sizes = [layer.moved_bytes for layer in self.layers]
        self.sizes = sizes if any(sizes) else [1] * len(sizes)
        self.size_sums = [0, *accumulate(self.sizes)]
        self.weights = weigh(self.layers, replica.problem.work.cost)
        self.works = self._works()
        self.work = self.works.sum(0)
        self.sends = np.zeros((max(1, self.stages - 1), len(self.layers) + 1))
        for boundary, link in enumerate(replica.links):
            self.sends[boundary, 1:] = [link.seconds(x.output_bytes) for x in self.layers]
        # Layers before this one have neither B nor W. The number of stages that they fill decides
        # which ops a schedule has.
        self.frozen = next((i for i, x in enumerate(self.layers) if x.b or x.w), len(self.layers))
        self.schedules: dict[int, Schedule] = {}
        self.judged = dict[Bounds, Plan | None]()
        self.budget = 0
        # What the round's schedule keeps alive, and the limits that it is told.
        self.memory: MemoryLimits | None = None
        self.told: list[int] = []

    def _works(self) -> Floats:
        """Sums of F, B and W of the layers before each layer, on each stage's rank.

        There is one row for all stages if all ranks are alike.
        """
        sums = np.array(
            [
                [0.0, *accumulate(times)]
                for times in zip(*((x.f, x.b, x.w) for x in self.layers), strict=True)
            ]
        )
        return sums[:, None, :] / np.array(self.speeds or [1.0])[None, :, None]

    def run(self, quick: bool) -> Plan:
        quick = quick or self.replica.problem.work.cost != "time"
        starts = self.starts()
        best = self.judged[starts[0]] = self.evaluate(starts[0])
        for bounds in self.worth_a_schedule(starts):
            if quick and not best.beyond:
                return best
            best = self.better(best, bounds)
        for _ in range(_ROUNDS if self.replica.limits is None else _FITTING_ROUNDS):
            if quick and not best.beyond:
                break
            before, seen = best, len(self.judged)
            self.schedules = {self.frozen_stages(best.partition.bounds): best.schedule}
            self.budget = _OPS if self.stages == self.ranks else _OPS_OF_SEVERAL
            self.correct(best)
            first = dict.fromkeys([best.partition.bounds, *starts])
            by_time = sorted(first, key=lambda bounds: (self.over(bounds), self.replay(bounds)))
            for bounds in by_time[: _STARTS * (self.stages // self.ranks)]:
                best = self.better(best, self.descend(bounds))
            refused = any(x is None or x.beyond for x in list(self.judged.values())[seen:])
            if best.schedule.ops == before.schedule.ops and not (refused and best is not before):
                break  # another round would look at the same
        if best.beyond:
            return self.nearest(best, _QUICK_TRIES if quick else _TRIES)
        return best if quick or self.replica.limits is None else self.climbed(best, _TRIES)[0]

    def nearest(self, best: Plan, ops: int) -> Plan:
        """Moves one boundary at a time, each judged by its true bytes, while they get fewer.

        It goes on from the best plan, from the one that would be best with enough memory, and from
        the present one.
        """
        free = self.least_bottleneck(None)[0].bounds
        for start in dict.fromkeys((best.partition.bounds, free, self.current.bounds)):
            here = best if start == best.partition.bounds else self.evaluate(start)
            here, ops = self.climbed(here, ops)
            best = min(best, here, key=lambda plan: plan.rank)
            if not best.beyond:
                break
        return best

    def climbed(self, here: Plan, ops: int) -> tuple[Plan, int]:
        """Moves one boundary at a time while the plan gets better. Returns it and the ops left.

        A plan that does not fit goes on until it does.
        """
        before, short = None, here.beyond
        while here is not before and ops > 0 and bool(here.beyond) == bool(short):
            before, bounds = here, here.partition.bounds
            for at, by in product(range(1, self.stages), (-1, 1)):
                other = (*bounds[:at], bounds[at] + by, *bounds[at + 1 :])
                if all(a < b for a, b in pairwise(other)):
                    here = self.fitter(here, other)
                    ops -= 3 * self.stages * self.replica.mesh.microbatches
        return here, ops

    def fitter(self, here: Plan, bounds: Bounds) -> Plan:
        """The one of two plans that fits better, or else the faster one."""
        if self.hopeless(here, bounds):
            return here
        try:
            plan = self.evaluate(bounds)
        except ScheduleError:
            return here
        faster = plan.beyond == here.beyond and plan.step < here.step * (1 - _SAME)
        return plan if plan.beyond < here.beyond or faster else here

    # -- where it starts ---------------------------------------------------------------------------

    def starts(self) -> list[Bounds]:
        """Placements of the least bottleneck, the one with the fewest moves first, and others."""
        found: list[Partition] = []
        for memory in self.estimates():
            try:
                found += self.least_bottleneck(memory)
            except NoRoomError:
                continue
        found += [self.even, self.current]
        return list(dict.fromkeys(x.bounds for x in found))

    def estimates(self) -> Iterator[MemoryLimits | None]:
        """What the stages may hold, before there is a schedule. None: as much as they like."""
        limits = self.replica.limits
        if limits is not None:
            # The largest workspace is room enough for each op of a stage, whatever its layers.
            aside = max((layer.workspace_bytes for layer in self.layers), default=0)
            of_stages = tuple(max(0, limits[rank] - aside) for rank in self.stage_ranks)
            for pairs in self.residents():
                yield MemoryLimits(self.layers, pairs, of_stages)
        yield None

    def residents(self) -> Iterator[tuple[Pairs, ...]]:
        """The microbatches that the schedule keeps alive with all stages alike.

        A schedule that is made within limits may keep little or much.
        """
        mesh = self.replica.mesh
        # One activation of a stage is 1 here. The caps are 1F1B's memory, and at least that of one
        # microbatch.
        caps = (float(max(mesh.pipeline, self.stages // mesh.pipeline)),) * mesh.pipeline
        chunks = self.replica.problem.work.chunks
        name, ranks, microbatches = mesh.schedule, mesh.pipeline, mesh.microbatches
        yield resident(make(name, ranks, microbatches, chunks=chunks, caps=caps))
        if name == "zb-auto" and ranks > 1:
            yield (((1, 0), (0, 1)),) * self.stages

    def least_bottleneck(self, memory: MemoryLimits | None) -> list[Partition]:
        if self.stages > self.ranks:
            best = chunked(
                self.weights,
                self.stage_ranks,
                memory=memory,
                current=self.current,
                speeds=self.rates,
            )
            return [best, *ties(self.weights, self.stages)]
        found = ties(
            self.weights,
            self.stages,
            memory=memory,
            current=self.current,
            speeds=self.speeds,
        )
        if self.anew:
            found = [*found[1:], found[0]]
        sizes, links = [layer.output_bytes for layer in self.layers], self.replica.links
        if any(link.seconds(size) for link in links for size in sizes):
            found.append(
                exact(
                    self.weights,
                    self.stages,
                    memory=memory,
                    current=self.current,
                    speeds=self.speeds,
                    links=links,
                    output_bytes=sizes,
                )
            )
        return found

    def worth_a_schedule(self, starts: Sequence[Bounds]) -> list[Bounds]:
        """Placements that are judged by a schedule of their own before the descent."""
        found = [self.current.bounds, *starts[1:]]
        if self.stages > self.ranks:
            for memory in self.estimates():
                microbatches, ranks = self.replica.mesh.microbatches, self.stage_ranks
                flows = flowing(self.layers, ranks, microbatches, memory=memory, speeds=self.rates)
                found += [partition.bounds for partition, _ in flows if partition]
        return found

    # -- memory ------------------------------------------------------------------------------------

    def correct(self, plan: Plan) -> None:
        """Takes the bytes that this plan's schedule keeps alive, and what truly comes on top."""
        limits = self.replica.limits
        if limits is None:
            return
        own = tuple(limits[rank] for rank in self.stage_ranks)
        self.memory = MemoryLimits(self.layers, resident(plan.schedule), own)
        known = self.held(plan.partition.bounds)
        each = zip(limits, plan.memory, known, strict=True)
        self.told = [limit - (need - held) for limit, need, held in each]

    def held(self, bounds: Bounds) -> list[int]:
        """Bytes of each rank by the round's schedule."""
        held = [0] * self.ranks
        if self.memory is not None:
            for stage, (start, stop) in enumerate(pairwise(bounds)):
                held[self.stage_ranks[stage]] += self.memory.need(stage, start, stop)
        return held

    def over(self, bounds: Bounds) -> int:
        """The most bytes that a rank is expected to need beyond its limit."""
        if self.memory is None:
            return 0
        return max(0, *(a - b for a, b in zip(self.held(bounds), self.told, strict=True)))

    # -- how long it takes -------------------------------------------------------------------------

    def evaluate(self, bounds: Bounds) -> Plan:
        mesh, partition = self.replica.mesh, Partition.from_bounds(bounds)
        return evaluate(self.replica.problem, Choice(mesh, partition, self.recomputed))

    def hopeless(self, best: Plan, bounds: Bounds) -> bool:
        """True if `best` fits, and no schedule of the other placement is as fast."""
        if best.beyond:
            return False
        replica, partition = self.replica, Partition.from_bounds(bounds)
        work, costs = replica.problem.work, replica.costs(self.layers, partition)
        first = min(partition.owner(replica.problem.profile.first_trainable), self.stages - 1)
        m, ranks = replica.mesh.microbatches, self.stage_ranks
        least = lower_bound(costs, m, first, work.objective, stage_ranks=ranks)
        return least > best.step * (1 + _SAME)

    def better(self, best: Plan, bounds: Bounds) -> Plan:
        if bounds in self.judged or self.hopeless(best, bounds):
            return best
        self.judged[bounds] = None
        try:
            plan = self.judged[bounds] = self.evaluate(bounds)
        except ScheduleError:  # say, the memory is enough for the stages, but for no own schedule
            return best
        if plan.beyond and self.memory is not None:
            # The bytes were more than expected. The rest of the search is told of less room.
            assert self.replica.limits is not None
            each = zip(self.told, self.replica.limits, plan.memory, self.held(bounds), strict=True)
            self.told = [min(own, limit - (need - held)) for own, limit, need, held in each]
        if plan.beyond != best.beyond:
            return plan if plan.beyond < best.beyond else best
        if abs(plan.step - best.step) > _SAME * best.step:
            return plan if plan.step < best.step else best
        return plan if self.moved(bounds) < self.moved(best.partition.bounds) else best

    def loads(self, bounds: Bounds) -> list[float]:
        work = self.work
        return [
            float(work[s % len(work), stop] - work[s % len(work), start])
            for s, (start, stop) in enumerate(pairwise(bounds))
        ]

    def moved(self, bounds: Bounds) -> int:
        """Bytes of the layers that are not where `current` has them."""
        sums, kept = self.size_sums, 0
        for (start, stop), (old_start, old_stop) in zip(
            pairwise(bounds), pairwise(self.current.bounds), strict=False
        ):
            kept += max(0, sums[min(stop, old_stop)] - sums[max(start, old_start)])
        return sums[-1] - kept

    def frozen_stages(self, bounds: Bounds) -> int:
        return bisect_right(bounds, self.frozen, 1, len(bounds) - 1) - 1

    def schedule(self, bounds: Bounds) -> Schedule | None:
        frozen = self.frozen_stages(bounds)
        if frozen not in self.schedules:
            try:
                self.schedules[frozen] = self.evaluate(bounds).schedule
            except ScheduleError:
                return None
        return self.schedules[frozen]

    def replay(self, bounds: Bounds, best: float = math.inf) -> float:
        """The time of a placement under the round's schedule."""
        schedule = self.schedule(bounds)
        if schedule is None:
            return math.inf
        self.budget -= len(schedule.order.rows)
        at = np.array(bounds, np.int64)
        whole = self.replica.problem.work.objective is Objective.MAKESPAN
        given = self.works, self.sends, at, best, whole
        return replay(schedule.order, schedule.graph, self.rank_of, *given)

    # -- the descent -------------------------------------------------------------------------------

    def descend(self, bounds: Bounds) -> Bounds:
        """Moves one layer at a time while the bytes over the limit fall, then the time.

        In the same time the fewer bytes moved decide.
        """
        bounds = self.emptied(bounds)
        least = self.replay(bounds)
        moved = self.moved(bounds)
        tried = {bounds}
        progress = not self.over(bounds)
        while progress and self.budget > 0:
            progress = False
            for other in self.neighbours(bounds, least * (1 + _SAME)):
                if other in tried or self.over(other):
                    continue
                tried.add(other)
                value = self.replay(other, least * (1 + _SAME))
                if value < least * (1 - _SAME) or (
                    value <= least * (1 + _SAME) and self.moved(other) < moved
                ):
                    bounds, moved = other, self.moved(other)
                    least, progress = min(least, value), True
                    break
                if self.budget <= 0:
                    break
        return bounds

    def emptied(self, bounds: Bounds) -> Bounds:
        """Moves one layer at a time while the fullest rank gets emptier, until all ranks fit."""
        over = self.over(bounds)
        while over:
            others = {other: self.over(other) for other in self.neighbours(bounds, math.inf)}
            nearest = min(others, key=lambda other: others[other], default=bounds)
            if others.get(nearest, over) >= over:
                break
            bounds, over = nearest, others[nearest]
        return bounds

    def neighbours(self, bounds: Bounds, best: float) -> Iterator[Bounds]:
        """Placements with one layer moved between two stages, whose work alone takes no longer.

        Moves from the most loaded to the least loaded stage come first. This is a heuristic.
        """
        load, schedule = self.loads(bounds), self.schedule(bounds)
        order = sorted(range(self.stages), key=lambda stage: (-load[stage], stage))
        found = promising(
            np.zeros(4 * self.stages, np.int64) if schedule is None else schedule.order.counts,
            self.rank_of,
            self.works,
            np.array(bounds, np.int64),
            np.array(order, np.int64),
            best,
        )
        return (tuple(row.tolist()) for row in found)
