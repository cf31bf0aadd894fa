"""Searches the fastest use of N GPUs for one global batch.

A mesh has a number of replicas, a length of the pipeline, microbatches and a schedule:

    gpus = pipeline x replicas            global batch = replicas x microbatches x micro_batch

              pipeline of 4                    2 replicas of a pipeline of 2
    rank 0  F0 F1 F2 F3 B0 ...                 F0 F1 B0 ... | reduce
    ...                                        ...

Each of the two replicas has half the microbatches and half the pipeline to fill. A rank has more
weights, and there are gradients to reduce.

Zero Bubble's rebuttal makes the point. With no bubbles to hide, few microbatches are enough. The
same batch can then go to more replicas, and ZeRO pays for the memory. Each candidate is a plan
(`stage_plan`): placed by a balancer, scheduled, simulated, its memory checked.

`mesh_plan` has the costs of a mesh and the time of its reductions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import final

from dynmo.cost.profile_file import Profile
from dynmo.errors import InputError, NoRoomError, PartitionError, ScheduleError
from dynmo.plan.bisection import exact
from dynmo.plan.make_plan import make_plan
from dynmo.plan.mesh_plan import Mesh, MeshPlan, add_reductions, mesh_profile
from dynmo.plan.meshes import divisors
from dynmo.plan.partition import stage_loads, uniform
from dynmo.plan.plan_request import PlanRequest, RecomputeMode, memory_needs
from dynmo.plan.stage_costs import freeze, pipeline_costs
from dynmo.schedule.bounds import Objective
from dynmo.schedule.catalogue import check_microbatches, chunks_of, make

SCHEDULES = ("zb-h1", "1f1b", "zb-h2", "zb-auto", "zb-v")
# These need less memory than zb-v and are hardly ever faster. They are tried if memory is limited.
FRUGAL = ("v-half", "v-min")


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
class MeshSearchResult:
    """The result of a search.

    Attributes:
        candidates: The plans, the best first.
        slower: Number of meshes that were left out, because even without any bubble they would take
            longer than the candidates.
    """

    candidates: tuple[MeshPlan, ...]
    refused: tuple[RefusedMesh, ...]
    slower: int


_MOST = 1 << 53  # whole numbers up to this one are exact as floats


@dataclass(frozen=True)
class MeshRequest:
    """The costs, and what a search may vary.

    Attributes:
        profile: Measured costs. They say how many sequences a microbatch has.
        global_batch: Sequences of a step.
        micro_batches: Sizes of a microbatch to try, in sequences. Empty: the measured one, its
            halves and its doubles.
        schedules: Names of the schedules to try. Empty: SCHEDULES, and FRUGAL if memory is limited.
        chunks: Stages per rank, for the schedule that lets one choose.
        memory_limit: Bytes of a rank. None means unlimited.
        zero: 1 if ZeRO divides the optimizer state over the replicas, else 0.
        bandwidth: Bytes per second between replicas. inf: reductions take no time.
        keep: Number of candidates that are wanted.
        replicas: The numbers of replicas that are allowed. Empty: any.
        accumulation_groups: Number of accumulation groups of the whole mesh. None: the profile's
            own account counts in any mesh.
    """

    profile: Profile
    gpus: int
    global_batch: int
    micro_batches: tuple[int, ...] = ()
    schedules: tuple[str, ...] = ()
    balancer: str = "exact"
    chunks: int | None = None
    memory_limit: int | None = None
    zero: int = 0
    bandwidth: float = math.inf
    recompute: RecomputeMode = "none"
    objective: Objective = Objective.SPAN
    keep: int = 10
    replicas: tuple[int, ...] = ()
    accumulation_groups: int | None = None

    def __post_init__(self) -> None:
        for what, value in (
            ("GPUs", self.gpus),
            ("sequences in a global batch", self.global_batch),
            ("candidates", self.keep),
        ):
            if not 1 <= value <= _MOST:
                raise PartitionError(
                    f"{value} {what}; at least 1 is needed"
                    + f", and at most {_MOST}" * (value > _MOST)
                )
        if self.zero not in (0, 1):
            raise PartitionError(f"zero = {self.zero}; it is 0 or 1")
        if not self.bandwidth > 0:
            raise PartitionError(
                f"a bandwidth of {self.bandwidth} bytes per second; it is a number over 0"
            )
        if self.profile.microbatch is None:
            raise PartitionError(
                "the costs do not say of how many sequences a microbatch is, so they cannot be "
                'scaled; add "microbatch": 1 to the file, say'
            )
        wrong = next((size for size in self.micro_batches if size < 1), None)
        if wrong is not None:
            raise PartitionError(f"a microbatch of {wrong} sequences; at least 1 is needed")

    @property
    def names(self) -> tuple[str, ...]:
        return self.schedules or SCHEDULES + (() if self.memory_limit is None else FRUGAL)

    @property
    def sizes(self) -> tuple[int, ...]:
        if self.micro_batches:
            return tuple(sorted(set(self.micro_batches)))
        own = self.profile.microbatch
        assert own is not None
        halves = (own >> k for k in (2, 1) if own % (1 << k) == 0)
        return tuple(x for x in (*halves, own, 2 * own, 4 * own) if self.global_batch % x == 0) or (
            own,
        )


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


def least_seconds(request: MeshRequest) -> float:
    """Returns a bound that no mesh of the request beats: the busiest rank's work, without waits."""
    search = _Search(request)
    return min(search.bound(mesh) for mesh in search.meshes())


def search(request: MeshRequest, quick: bool = False) -> MeshSearchResult:
    """Places every mesh that the request allows by the balancer.

    Args:
        quick: Place by the least bottleneck, without simulating. Steps then come out some percent
            longer.

    Raises:
        PartitionError: No pipeline divides the GPUs, no size divides the batch, or nothing fits the
            memory (`NoMeshFitsError`). The message says by how much the least misses it.
    """
    return _Search(request).run(quick)


# The most ops that are placed by simulation. They are spent on the meshes that a quick look finds
# best. The three best meshes are placed in any case.
_REFINED = 30_000


@final
class _Search:
    def __init__(self, request: MeshRequest) -> None:
        self.request = request
        self.refused: list[RefusedMesh] = []
        self.loads: dict[tuple[int, bool], float] = {}

    def run(self, only_quick: bool) -> MeshSearchResult:
        request = self.request
        meshes = sorted(
            self.meshes(), key=lambda mesh: (self.bound(mesh), mesh.replicas, mesh.micro_batch)
        )
        quick: list[MeshPlan] = []
        slower = 0
        for mesh in meshes:
            shown = sorted(x.seconds for x in quick)[: request.keep]
            # The result of a quick look may be some percent off its best, like those that it is
            # compared with.
            if len(shown) == request.keep and self.bound(mesh) > shown[-1]:
                slower += 1
                continue
            candidate = self.plan_mesh(mesh, quick=True)
            if candidate is not None:
                quick.append(candidate)
        if not quick:
            if request.memory_limit is None:
                raise PartitionError(self.nothing(meshes))
            raise NoMeshFitsError(self.nothing(meshes), self.closest(meshes))
        quick.sort(key=lambda x: x.seconds)
        ops = accumulate(3 * x.mesh.microbatches * len(x.plan.request.stage_ranks) for x in quick)
        refined = [not only_quick and (done <= _REFINED or i < 3) for i, done in enumerate(ops)]
        best = [self.refine(x) if wanted else x for x, wanted in zip(quick, refined, strict=True)]
        best.sort(
            key=lambda x: (
                x.seconds,
                x.mesh.pipeline,
                x.mesh.microbatches,
                request.names.index(x.mesh.schedule),
            )
        )
        return MeshSearchResult(
            tuple(best[: request.keep]),
            tuple(self.refused),
            slower + max(0, len(best) - request.keep),
        )

    # -- the meshes to try -------------------------------------------------------------------------

    def pipelines(self) -> list[int]:
        gpus, layers = self.request.gpus, len(self.request.profile.layers)
        return [p for p in divisors(gpus) if p <= layers]

    def meshes(self) -> Iterator[Mesh]:
        request = self.request
        # One rank has no bubbles to fill. All schedules are as fast, and one stage keeps the least.
        alone = [name for name in request.names if chunks_of(name, request.chunks) == 1][:1]
        possible = False
        for pipeline in self.pipelines():
            replicas = request.gpus // pipeline
            for size in request.sizes:
                microbatches, rest = divmod(request.global_batch, replicas * size)
                for schedule in alone or request.names if pipeline == 1 else request.names:
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
        request, layers = self.request, len(self.request.profile.layers)
        if request.replicas and mesh.replicas not in request.replicas:
            return f"{mesh.replicas} replicas are none of {', '.join(map(str, request.replicas))}"
        if rest or not mesh.microbatches:
            parts = f"{mesh.replicas} replicas x microbatches of {mesh.micro_batch}"
            return f"a global batch of {request.global_batch} does not divide into {parts}"
        stages = mesh.pipeline * chunks_of(mesh.schedule, request.chunks)
        if stages > layers:
            return f"{stages} stages need at least {stages} layers; the model has {layers}"
        try:
            check_microbatches(mesh.schedule, mesh.pipeline, mesh.microbatches)
        except ScheduleError as error:
            return str(error)
        return None

    def none_possible(self) -> str:
        request, layers = self.request, len(self.request.profile.layers)
        if request.replicas and all(x.mesh.replicas not in request.replicas for x in self.refused):
            allowed = ", ".join(map(str, request.replicas))
            return (
                f"{request.gpus} ranks have no mesh: the model has {layers} layers, and the "
                f"replicas may be {allowed}; use fewer ranks"
            )
        undivided = [x for x in self.refused if "does not divide" in x.reason]
        if len(undivided) < len(self.refused):
            return next(x.reason for x in self.refused if x not in undivided)
        least = request.gpus // max(self.pipelines())
        batches = sorted({least * size for size in request.sizes})
        return (
            f"{request.gpus} GPUs cannot be used: the model's {layers} layers allow at least "
            f"{least} replicas, and a global batch of "
            f"{request.global_batch} does not divide by any number of replicas x microbatches of "
            f"{', '.join(map(str, request.sizes))}; "
            f"take a multiple of {' or '.join(map(str, batches))}, or another number of GPUs"
        )

    # -- one mesh ----------------------------------------------------------------------------------

    def plan_request(self, mesh: Mesh) -> PlanRequest:
        request = self.request
        return PlanRequest(
            mesh_profile(request.profile, mesh, request.zero, request.accumulation_groups),
            mesh.pipeline,
            mesh.microbatches,
            mesh.schedule,
            request.balancer,
            request.chunks,
            request.memory_limit,
            request.objective,
            any_links=True,
            recompute=request.recompute,
            replicas=mesh.replicas,
        )

    def plan_mesh(self, mesh: Mesh, quick: bool) -> MeshPlan | None:
        plan_request = replace(self.plan_request(mesh), quick=quick)
        try:
            return add_reductions(
                mesh, make_plan(plan_request), self.request.bandwidth, self.request.zero
            )
        except (PartitionError, ScheduleError) as error:
            if quick:
                self.refused.append(self.explain(plan_request, mesh, error))
            return None

    def explain(self, plan_request: PlanRequest, mesh: Mesh, error: InputError) -> RefusedMesh:
        limit = self.request.memory_limit
        if limit is None:
            return RefusedMesh(mesh, str(error))
        try:
            need = self.need(plan_request)
        except (PartitionError, ScheduleError) as other:
            return RefusedMesh(mesh, str(other))
        most = max(need)
        if most <= limit:
            return RefusedMesh(mesh, str(error))
        rank = need.index(most)
        recomputing = "" if plan_request.recompute == "none" else " with everything recomputed"
        reason = (
            f"memory: rank {rank} needs {most} bytes{recomputing}, {most - limit} over the limit "
            f"of {limit}"
        )
        return RefusedMesh(mesh, reason, most)

    def need(self, plan: PlanRequest) -> tuple[int, ...]:
        """Bytes per rank if the layers are balanced by time, without regard to memory."""
        every = range(len(plan.kept)) if plan.recompute != "none" else ()
        plan = replace(plan, recomputed=frozenset(every))
        weights, stages = [layer.seconds for layer in plan.layers], len(plan.stage_ranks)
        even = uniform(len(weights), stages) if stages > plan.ranks else exact(weights, plan.ranks)
        costs = pipeline_costs(plan.layers, even, links=plan.links)
        # The least caps are those of one microbatch.
        least = tuple(max(0.0, x.held) for x in costs.stages)
        schedule = make(
            plan.schedule,
            plan.ranks,
            plan.microbatches,
            costs=costs,
            chunks=plan.chunks,
            caps=least if plan.schedule == "zb-auto" else None,
        )
        return memory_needs(plan, even, schedule)

    def closest(self, meshes: Sequence[Mesh]) -> RefusedMesh | None:
        short = [x for x in self.refused if x.need is not None and x.mesh in set(meshes)]
        return min(short, key=lambda x: x.need or 0, default=None)

    def nothing(self, meshes: Sequence[Mesh]) -> str:
        tried = [x for x in self.refused if x.mesh in set(meshes)]
        least = self.closest(meshes)
        if least is None:
            return tried[0].reason
        more = "" if self.request.recompute != "none" else ", --recompute auto"
        more += "" if self.request.zero else ", --zero 1"
        return (
            f"none of {len(tried)} meshes fits; the least, {least.mesh}: {least.reason}; "
            f"take more GPUs, smaller microbatches{more}"
        )

    def refine(self, candidate: MeshPlan) -> MeshPlan:
        """Places by simulation, if the quick plan is not at the mesh's bound already."""
        if candidate.seconds <= self.bound(candidate.mesh) * (1 + 1e-6):
            return candidate
        other = self.plan_mesh(candidate.mesh, quick=False)
        return other if other is not None and other.seconds < candidate.seconds else candidate

    def bound(self, mesh: Mesh) -> float:
        """A bound of the seconds of any placement: the busiest rank's work, without waits."""
        size = self.request.profile.microbatch
        assert size is not None
        chunks = chunks_of(mesh.schedule, self.request.chunks)
        load = self.bottleneck(mesh.pipeline, mesh.pipeline == 1 or chunks == 1)
        return mesh.microbatches * mesh.micro_batch / size * load * (1 - 1e-9)

    def bottleneck(self, ranks: int, contiguous: bool) -> float:
        """The least seconds of a measured microbatch on the busiest rank."""
        if (ranks, contiguous) not in self.loads:
            profile = self.request.profile
            weights = [x.seconds for x in freeze(profile.layers, profile.first_trainable)]
            if contiguous:
                self.loads[ranks, contiguous] = max(stage_loads(weights, exact(weights, ranks)))
            else:
                self.loads[ranks, contiguous] = max(math.fsum(weights) / ranks, *weights)
        return self.loads[ranks, contiguous]
