"""The balancers by name: pure functions from a request to a `Partition`.

Every rank that asks the same gets the same answer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property

from dynmo.cost.layer_cost import LayerCost, LinkCost
from dynmo.cost.profile_file import Profile
from dynmo.errors import ConfigError, NoRoomError, PartitionError, ScheduleError
from dynmo.options import OWN, find_own
from dynmo.plan.bisection import chunked, exact
from dynmo.plan.diffusion import diffuse
from dynmo.plan.evaluate import Plan, evaluate, pipeline_costs
from dynmo.plan.options import BALANCERS, OWN_BALANCER
from dynmo.plan.partition import Cost, Partition, uniform, weigh
from dynmo.plan.problem import Choice, Mesh, Problem, Work
from dynmo.plan.schedule_aware import PlacementProblem, faster, search
from dynmo.plan.stage_costs import Make, by_name
from dynmo.schedule.bounds import Objective
from dynmo.schedule.memory import MemoryLimits, Pairs


@dataclass(frozen=True)
class BalanceRequest:
    """The costs of the layers and their current placement.

    Attributes:
        current: If a rank has several stages, it has a count per stage.
        resident: Microbatches that each stage keeps alive, from `simulator.resident` of the
            schedule that will run.
        memory_limit: Bytes, one entry per stage. Needs `resident`. None: memory is ignored.
        seed: For your own balancer, if it chooses at random.
        step: The step before which layers may move.
        names: Names of the layers. May be empty.
        make: Gives the schedule that would run at some costs (see `by_name`). "exact" then looks
            for the least simulated time. None: it looks for the least bottleneck.
        links: One per boundary. Used with `make`, as are `objective` and `first_trainable_layer`.
        speeds: One entry per rank.
        stage_ranks: The rank of each stage, if a rank has several. "exact" takes it into account.
        quick: "exact" does not search by simulated time.
    """

    layers: tuple[LayerCost, ...]
    current: Partition
    cost: Cost = "time"
    resident: tuple[Pairs, ...] | None = None
    memory_limit: tuple[int, ...] | None = None
    seed: int = 0
    step: int = 0
    names: tuple[str, ...] = ()
    make: Make | None = None
    links: tuple[LinkCost, ...] | None = None
    objective: Objective = Objective.SPAN
    first_trainable_layer: int = 0
    speeds: tuple[float, ...] | None = None
    stage_ranks: tuple[int, ...] | None = None
    quick: bool = False

    def __post_init__(self) -> None:
        if len(self.layers) != self.current.layers:
            raise PartitionError(
                f"a placement of {self.current.layers} layers for {len(self.layers)} layer costs"
            )
        if self.stage_ranks is not None and len(self.stage_ranks) != self.current.stages:
            raise PartitionError(
                f"a placement of {len(self.stage_ranks)} stages on ranks for {self.current.stages} "
                "stages of layers"
            )
        if self.names and len(self.names) != len(self.layers):
            raise PartitionError(
                f"{len(self.names)} names for {len(self.layers)} layers; "
                "give one per layer, or none"
            )
        if self.memory_limit is not None:
            if self.resident is None:
                raise PartitionError(
                    "a memory limit needs the schedule's resident microbatches too; "
                    "give both or neither"
                )
            for what, count in (
                ("memory limits", len(self.memory_limit)),
                ("resident stages", len(self.resident)),
            ):
                if count != self.current.stages:
                    raise PartitionError(
                        f"{count} {what} for {self.current.stages} ranks; give one per rank"
                    )

    @property
    def weights(self) -> tuple[float, ...]:
        return weigh(self.layers, self.cost)

    @property
    def several(self) -> tuple[int, ...]:
        """The rank of each stage if a rank has several stages, else empty."""
        ranks = self.stage_ranks or ()
        return ranks if len(set(ranks)) < len(ranks) else ()

    @cached_property
    def memory(self) -> MemoryLimits | None:
        if self.memory_limit is None or self.resident is None:
            return None
        # The largest workspace is room enough for each op of a stage, whatever its layers.
        aside = max((layer.workspace_bytes for layer in self.layers), default=0)
        return MemoryLimits(
            self.layers, self.resident, tuple(max(0, limit - aside) for limit in self.memory_limit)
        )


Balancer = Callable[[BalanceRequest], Partition]
"""Returns a placement on as many ranks as `current` has.

Raises PartitionError if the placement that the balancer stands for does not fit the memory."""


def _none(request: BalanceRequest) -> Partition:
    """The current placement, whether it fits or not."""
    return request.current


def _uniform(request: BalanceRequest) -> Partition:
    return _fitting(request, uniform(len(request.layers), request.current.stages))


def _exact(request: BalanceRequest) -> Partition:
    if request.make is not None and request.cost == "time" and not request.quick:
        return search(_problem(request, request.make)).partition
    if request.several:
        return chunked(
            request.weights,
            request.several,
            memory=request.memory,
            current=request.current,
            speeds=request.speeds,
        )
    return _faster_with_links(
        request,
        lambda links, output_bytes: exact(
            request.weights,
            request.current.stages,
            memory=request.memory,
            current=request.current,
            speeds=request.speeds,
            links=links,
            output_bytes=output_bytes,
        ),
    )


SLOW = 0.1
"""A link is slow if a message takes this share of the mean stage's time."""

_Place = Callable[[Sequence[LinkCost] | None, Sequence[int] | None], Partition]


def _faster_with_links(request: BalanceRequest, place: _Place) -> Partition:
    """The placement without links, unless the one with links takes less simulated time.

    Both are the same if no link is slow.
    """
    plain = place(None, None)
    if request.make is None or request.cost != "time" or request.several:
        return plain
    sizes = [layer.output_bytes for layer in request.layers]
    slowest = max((link.seconds(max(sizes)) for link in request.links or ()), default=0.0)
    if slowest <= SLOW * math.fsum(request.weights) / request.current.stages:
        return plain
    with suppress(PartitionError, ScheduleError):  # say, the memory holds no such schedule
        return faster(_problem(request, request.make), plain, place(request.links, sizes))
    return plain


def _problem(request: BalanceRequest, make: Make) -> PlacementProblem:
    return PlacementProblem(
        request.layers,
        len(set(request.several)) or request.current.stages,
        make,
        links=request.links,
        memory=request.memory,
        current=request.current,
        first_trainable_layer=request.first_trainable_layer,
        objective=request.objective,
        speeds=request.speeds,
        stage_ranks=request.several or None,
    )


def _diffusion(request: BalanceRequest) -> Partition:
    memory = request.memory
    return _faster_with_links(
        request,
        lambda links, output_bytes: _fitting(
            request,
            diffuse(
                request.weights,
                request.current,
                fits=memory.fits if memory else None,
                links=links,
                output_bytes=output_bytes,
            ).partition,
        ),
    )


def _fitting(request: BalanceRequest, partition: Partition) -> Partition:
    """`partition`, or NoRoomError with its first stage that does not fit."""
    memory = request.memory
    if memory is None:
        return partition
    for stage in range(partition.stages):
        span = partition.range_of(stage)
        need, limit = memory.need(stage, span.start, span.stop), memory.limits[stage]
        if need > limit:
            raise NoRoomError(
                f"stage {stage} of the placement {partition.counts} needs {need} bytes, its "
                f"limit is {limit}; "
                "take the balancer 'exact', which looks for a placement that fits"
            )
    return partition


_DYNMOS: dict[str, Balancer] = {
    "none": _none,
    "uniform": _uniform,
    "exact": _exact,
    "diffusion": _diffusion,
}


def balancer(name: str) -> Balancer:
    """The balancer called `name`: one of BALANCERS, or your own by `python:package.module:NAME`.

    Your own is imported, and tried on a small request.

    Raises:
        PartitionError: The name is unknown. The message lists the known ones.
        ConfigError: There is no such balancer of your own, or it returns no placement.
    """
    if name in _DYNMOS:
        return _DYNMOS[name]
    if re.fullmatch(OWN, name):
        return _own(name)
    raise PartitionError(
        f"unknown balancer {name!r}; choose one of {', '.join(BALANCERS)}, or write "
        f"{OWN_BALANCER} for your own"
    )


def is_forced(name: str) -> bool:
    """True if layers move to the balancer's placement whatever a step takes there.

    Your own balancer is forced if it has an attribute `forced` that is true.
    """
    return name == "uniform" or (
        name not in _DYNMOS and bool(getattr(find_own("balancer", name), "forced", False))
    )


def _asked(request: BalanceRequest) -> tuple[Problem, Plan]:
    stage_ranks = request.stage_ranks or tuple(range(request.current.stages))
    ranks, limits = max(stage_ranks) + 1, request.memory_limit
    names = request.names or ("",) * len(request.layers)
    work = Work(request.objective, cost=request.cost, seed=request.seed, step=request.step)
    problem = Problem(
        Profile(request.layers, names, request.first_trainable_layer, microbatch=1),
        replace(work, chunks=len(stage_ranks) // ranks),
        None if limits is None else tuple(limits[stage_ranks.index(r)] for r in range(ranks)),
    )
    mesh = Mesh(ranks, 1, 1, 1, "1f1b")
    if request.make is not None:
        made = request.make(pipeline_costs(request.layers, request.current))
        mesh = replace(mesh, microbatches=made.microbatches, schedule=made.name)
    return problem, evaluate(problem, Choice(mesh, request.current))


@cache
def _own(name: str) -> Balancer:
    given = find_own("balancer", name)

    def balance(request: BalanceRequest) -> Partition:
        layers, stages = request.current.layers, request.current.stages
        partition = given(*_asked(request))
        if not isinstance(partition, Partition) or (layers, stages) != (
            partition.layers,
            partition.stages,
        ):
            raise ConfigError(
                f"balancer {name!r}: returned {partition!r}; return a Partition of all {layers} "
                f"layers on {stages} stages"
            )
        return _fitting(request, partition)

    layers = (LayerCost(1.0, 1.0, 1.0),) * 4
    trial = BalanceRequest(layers, Partition((3, 1)), make=by_name("1f1b", 4))
    with suppress(PartitionError):  # it has no placement of these layers
        balance(trial)
    return balance
