"""Searches the fastest use of N GPUs for one global batch.

A mesh has a number of replicas, a length of the pipeline, microbatches and a schedule:

    gpus = pipeline x replicas            global batch = replicas x microbatches x micro_batch

              pipeline of 4                    2 replicas of a pipeline of 2
    rank 0  F0 F1 F2 F3 B0 ...                 F0 F1 B0 ... | reduce
    ...                                        ...

Each of the two replicas has half the microbatches and half the pipeline to fill. A rank has more
weights, and there are gradients to reduce.

Zero Bubble's rebuttal makes the point. With no bubbles to hide, few microbatches are enough. The
same batch can then go to more replicas, and ZeRO pays for the memory. Each candidate is a plan:
placed by a balancer, scheduled, simulated, its memory checked.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import final

from dynmo.errors import NoRoomError, PartitionError, ScheduleError
from dynmo.plan.balancers import balancer
from dynmo.plan.bisection import exact
from dynmo.plan.costs import freeze
from dynmo.plan.evaluate import Plan, Replica, evaluate
from dynmo.plan.partition import Partition, divisors, enough, stage_loads
from dynmo.plan.placement import place, recomputing
from dynmo.plan.problem import Allowed, Choice, Mesh, Problem
from dynmo.schedule.catalogue import SHAPES, check_microbatches, chunks_of

SCHEDULES = ("zb-h1", "1f1b", "zb-h2", "zb-auto", "zb-v")
# These need less memory than zb-v and are hardly ever faster. They are tried if memory is limited.
FRUGAL = ("v-half", "v-min")
_ALIKE = 0.01
_MOST = 1 << 53  # whole numbers up to this one are exact as floats
# The most ops that are placed by simulation. They are spent on the meshes that a quick look finds
# best. The three best meshes are placed in any case.
_REFINED = 30_000


def handicap(name: str) -> float:
    """Returns the factor of a schedule's step time, where "auto" compares schedules.

    One with more messages must gain 1 % over the one before it.
    """
    return 1 + _ALIKE * SHAPES.index(name)


def check_sizes(problem: Problem) -> None:
    """Raises PartitionError if there is a memory limit, but no sizes."""
    sized = any(x.static_bytes or x.activation_bytes for x in problem.layers)
    if problem.memory_limit is not None and not sized:
        raise PartitionError(
            "a memory limit, but the costs have no sizes; "
            "give weight_bytes, activation_bytes, ... (one per layer)"
        )


def plan_on(
    problem: Problem,
    mesh: Mesh,
    allowed: Allowed,
    current: Partition | None = None,
    quick: bool = False,
) -> Plan:
    """Returns the plan of one mesh, placed by the balancer. It may not fit the memory."""
    enough(len(problem.layers), mesh.pipeline)
    check_sizes(problem)
    if allowed.balancer == "exact":
        return place(problem, mesh, current, allowed.recompute, quick)
    replica, place_by = Replica(problem, mesh), balancer(allowed.balancer)

    def placed(recomputed: Iterable[int] = ()) -> Plan:
        now = evaluate(problem, Choice(mesh, current or replica.current, frozenset(recomputed)))
        return evaluate(problem, replace(now.choice, partition=place_by(problem, now)))

    every = range(len(replica.layers))
    plan = placed(every if allowed.recompute == "all" else ())
    if not plan.beyond or allowed.recompute != "auto":
        return plan
    both = (recomputing(replica, plan), recomputing(replica, placed(every)))
    return min(both, key=lambda plan: plan.rank)


@dataclass(frozen=True)
class RefusedMesh:
    """A mesh that is impossible or does not fit.

    Attributes:
        need: Bytes of the fullest rank in the plan that comes closest to the memory limit. None if
            something else is wrong.
    """

    mesh: Mesh
    reason: str
    need: int | None = None


@dataclass(frozen=True)
class Found:
    """The result of a search.

    Attributes:
        plans: The best first.
        slower: Number of meshes that were left out, because even without any bubble they would take
            longer than these.
    """

    plans: tuple[Plan, ...]
    refused: tuple[RefusedMesh, ...]
    slower: int


class NoMeshFitsError(NoRoomError):
    """No mesh fits the memory. `closest` misses the limit by least, if its bytes are known."""

    def __init__(self, message: str, closest: RefusedMesh | None) -> None:
        super().__init__(message)
        self.closest = closest

    @property
    def shortage(self) -> str:
        if self.closest is None:
            return str(self)
        return f"as {self.closest.mesh}, {self.closest.reason.removeprefix('memory: ')}"


def least_seconds(problem: Problem, allowed: Allowed) -> float:
    """Returns a bound that no mesh beats: the busiest rank's work, without waits."""
    search = _Search(problem, allowed)
    return min(search.bound(mesh) for mesh in search.meshes())


def search(problem: Problem, allowed: Allowed, quick: bool = False) -> Found:
    """Places every mesh that is allowed by the balancer.

    Args:
        quick: Place by the least bottleneck, without simulating. Steps then come out some percent
            longer.

    Raises:
        PartitionError: No pipeline divides the GPUs, no size divides the batch, or nothing fits the
            memory (`NoMeshFitsError`). The message says by how much the least misses it.
    """
    return _Search(problem, allowed).run(quick)


@final
class _Search:
    def __init__(self, problem: Problem, allowed: Allowed) -> None:
        assert min(allowed.gpus, allowed.batch, allowed.keep, *allowed.sizes) >= 1
        assert problem.work.zero in (0, 1)
        assert problem.bandwidth > 0
        if allowed.batch > _MOST:
            raise PartitionError(
                f"{allowed.batch} sequences in a global batch; at most {_MOST} are possible"
            )
        if problem.profile.microbatch is None:
            raise PartitionError(
                "the costs do not say of how many sequences a microbatch is, so they cannot be "
                'scaled; add "microbatch": 1 to the file, say'
            )
        self.problem, self.allowed = problem, allowed
        frugal = () if problem.memory_limit is None else FRUGAL
        self.names = allowed.schedules or SCHEDULES + frugal
        self.refused: list[RefusedMesh] = []
        self.loads: dict[tuple[int, bool], float] = {}

    def run(self, only_quick: bool) -> Found:
        keep = self.allowed.keep
        meshes = sorted(
            self.meshes(), key=lambda mesh: (self.bound(mesh), mesh.replicas, mesh.micro_batch)
        )
        quick: list[Plan] = []
        slower = 0
        for mesh in meshes:
            shown = sorted(x.seconds for x in quick)[:keep]
            # The result of a quick look may be some percent off its best, like those that it is
            # compared with.
            if len(shown) == keep and self.bound(mesh) > shown[-1]:
                slower += 1
                continue
            plan = self.plan(mesh)
            if plan is not None:
                quick.append(plan)
        if not quick:
            if self.problem.memory_limit is None:
                raise PartitionError(self.nothing(meshes))
            raise NoMeshFitsError(self.nothing(meshes), self.closest(meshes))
        quick.sort(key=lambda x: x.seconds)
        ops = accumulate(3 * x.mesh.microbatches * len(x.stage_ranks) for x in quick)
        refined = [not only_quick and (done <= _REFINED or i < 3) for i, done in enumerate(ops)]
        best = [self.refine(x) if wanted else x for x, wanted in zip(quick, refined, strict=True)]
        best.sort(
            key=lambda x: (
                x.seconds,
                x.mesh.pipeline,
                x.mesh.microbatches,
                self.names.index(x.mesh.schedule),
            )
        )
        left_out = slower + max(0, len(best) - keep)
        return Found(tuple(best[:keep]), tuple(self.refused), left_out)

    # -- the meshes to try -------------------------------------------------------------------------

    @property
    def sizes(self) -> tuple[int, ...]:
        if self.allowed.sizes:
            return tuple(sorted(set(self.allowed.sizes)))
        own = self.problem.size
        halves = (own >> k for k in (2, 1) if own % (1 << k) == 0)
        near = (*halves, own, 2 * own, 4 * own)
        return tuple(x for x in near if self.allowed.batch % x == 0) or (own,)

    def pipelines(self) -> list[int]:
        return [p for p in divisors(self.allowed.gpus) if p <= len(self.problem.layers)]

    def meshes(self) -> Iterator[Mesh]:
        allowed, chunks = self.allowed, self.problem.work.chunks
        # One rank has no bubbles to fill. All schedules are as fast, and one stage keeps the least.
        alone = [name for name in self.names if chunks_of(name, chunks) == 1][:1]
        possible = False
        for pipeline in self.pipelines():
            replicas = allowed.gpus // pipeline
            for size in self.sizes:
                microbatches, rest = divmod(allowed.batch, replicas * size)
                for schedule in alone or self.names if pipeline == 1 else self.names:
                    mesh = Mesh(pipeline, replicas, microbatches, size, schedule)
                    reason = self.impossible(mesh, bool(rest))
                    if reason is None:
                        possible = True
                        yield mesh
                    else:
                        self.refused.append(RefusedMesh(mesh, reason))
        if not possible:
            raise PartitionError(self.none_possible())

    def impossible(self, mesh: Mesh, rest: bool) -> str | None:
        allowed, layers = self.allowed, len(self.problem.layers)
        if allowed.replicas and mesh.replicas not in allowed.replicas:
            return f"{mesh.replicas} replicas are none of {', '.join(map(str, allowed.replicas))}"
        if rest or not mesh.microbatches:
            parts = f"{mesh.replicas} replicas x microbatches of {mesh.micro_batch}"
            return f"a global batch of {allowed.batch} does not divide into {parts}"
        stages = mesh.pipeline * chunks_of(mesh.schedule, self.problem.work.chunks)
        if stages > layers:
            return f"{stages} stages need at least {stages} layers; the model has {layers}"
        try:
            check_microbatches(mesh.schedule, mesh.pipeline, mesh.microbatches)
        except ScheduleError as error:
            return str(error)
        return None

    def none_possible(self) -> str:
        allowed, layers = self.allowed, len(self.problem.layers)
        if allowed.replicas and all(x.mesh.replicas not in allowed.replicas for x in self.refused):
            return (
                f"{allowed.gpus} ranks have no mesh: the model has {layers} layers, and the "
                f"replicas may be {', '.join(map(str, allowed.replicas))}; use fewer ranks"
            )
        undivided = [x for x in self.refused if "does not divide" in x.reason]
        if len(undivided) < len(self.refused):
            return next(x.reason for x in self.refused if x not in undivided)
        least = allowed.gpus // max(self.pipelines())
        batches = sorted({least * size for size in self.sizes})
        return (
            f"{allowed.gpus} GPUs cannot be used: the model's {layers} layers allow at least "
            f"{least} replicas, and a global batch of "
            f"{allowed.batch} does not divide by any number of replicas x microbatches of "
            f"{', '.join(map(str, self.sizes))}; "
            f"take a multiple of {' or '.join(map(str, batches))}, or another number of GPUs"
        )

    # -- one mesh ----------------------------------------------------------------------------------

    def plan(self, mesh: Mesh) -> Plan | None:
        """A quick plan. None if the mesh is refused."""
        limit = self.problem.memory_limit
        try:
            plan = plan_on(self.problem, mesh, self.allowed, quick=True)
            assert math.isfinite(plan.seconds)  # or it raises
        except (PartitionError, ScheduleError) as error:
            self.refused.append(RefusedMesh(mesh, str(error)))
            return None
        if not plan.beyond:
            return plan
        assert plan.replica.limits is not None
        over = [need - own for need, own in zip(plan.memory, plan.replica.limits, strict=True)]
        rank = over.index(max(over))
        recomputing = "" if self.allowed.recompute == "none" else " with everything recomputed"
        reason = (
            f"memory: rank {rank} needs {plan.memory[rank]} bytes{recomputing}, {over[rank]} over "
            f"the limit of {limit}"
        )
        self.refused.append(RefusedMesh(mesh, reason, plan.memory[rank]))
        return None

    def closest(self, meshes: Sequence[Mesh]) -> RefusedMesh | None:
        short = [x for x in self.refused if x.need is not None and x.mesh in set(meshes)]
        return min(short, key=lambda x: x.need or 0, default=None)

    def nothing(self, meshes: Sequence[Mesh]) -> str:
        tried = [x for x in self.refused if x.mesh in set(meshes)]
        least = self.closest(meshes)
        if least is None:
            return tried[0].reason
        more = "" if self.allowed.recompute != "none" else ", --recompute auto"
        more += "" if self.problem.work.zero else ", --zero 1"
        return (
            f"none of {len(tried)} meshes fits; the least, {least.mesh}: {least.reason}; "
            f"take more GPUs, smaller microbatches{more}"
        )

    def refine(self, plan: Plan) -> Plan:
        """Places by simulation, if the quick plan is not at the mesh's bound already."""
        if plan.seconds <= self.bound(plan.mesh) * (1 + 1e-6):
            return plan
        try:
            other = plan_on(self.problem, plan.mesh, self.allowed)
        except (PartitionError, ScheduleError):
            return plan
        return min(plan, other, key=lambda plan: plan.rank)

    def bound(self, mesh: Mesh) -> float:
        """A bound of the seconds of any placement: the busiest rank's work, without waits."""
        chunks = chunks_of(mesh.schedule, self.problem.work.chunks)
        load = self.bottleneck(mesh.pipeline, mesh.pipeline == 1 or chunks == 1)
        return mesh.microbatches * mesh.micro_batch / self.problem.size * load * (1 - 1e-9)

    def bottleneck(self, ranks: int, contiguous: bool) -> float:
        """The least seconds of a measured microbatch on the busiest rank."""
        if (ranks, contiguous) not in self.loads:
            profile = self.problem.profile
            weights = [x.seconds for x in freeze(profile.layers, profile.first_trainable)]
            if contiguous:
                self.loads[ranks, contiguous] = max(stage_loads(weights, exact(weights, ranks)))
            else:
                self.loads[ranks, contiguous] = max(math.fsum(weights) / ranks, *weights)
        return self.loads[ranks, contiguous]
