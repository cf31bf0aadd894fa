"""The balancers by name: pure functions from a request to a `Partition`.

Every rank that asks the same gets the same answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from dynmo.balance.baselines import (
    deepspeed_balanced,
    deepspeed_type,
    deepspeed_uniform,
    in_order,
    megatron_uniform,
    placement,
)
from dynmo.balance.chunks import chunked
from dynmo.balance.diffusion import diffuse, published_diffusion
from dynmo.balance.partition import Cost, Partition, exact, uniform, weigh
from dynmo.balance.schedule_aware import PlacementProblem, search
from dynmo.balance.stage_costs import Make
from dynmo.cost.layer_cost import LayerCost, LinkCost
from dynmo.errors import NoRoomError, PartitionError
from dynmo.schedule.bounds import Objective
from dynmo.schedule.memory import MemoryLimits, Pairs


@dataclass(frozen=True)
class BalanceRequest:
    """The costs of the layers and their current placement.

    Attributes:
        layers: Cost of each layer.
        current: The placement now. If a rank has several stages, it has a count per stage.
        cost: What the balancer goes by.
        resident: Microbatches that each stage keeps alive, from `simulator.resident` of the
            schedule that will run. One entry per stage.
        memory_limit: Bytes, one entry per stage. Needs `resident`. None: memory is ignored.
        seed: Keys random choices, together with `step`.
        step: Keys random choices, together with `seed`.
        names: Names of the layers, for the baselines that go by them. May be empty.
        make: Gives the schedule that would run at some costs (see `by_name`). "schedule-aware"
            needs it, and "exact" chooses among ties with it.
        links: One per boundary. Only used with `make`.
        objective: What the schedule keeps short. Only used with `make`.
        first_trainable_layer: The layers before it are frozen. Only used with `make`.
        speeds: One entry per rank.
        stage_ranks: The rank of each stage, if a rank has several. "exact" and
            "schedule-aware" take it into account.
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
    if request.make is not None and request.cost == "time":
        return _simulated(request, request.make, ties_only=True)
    if request.several:
        best = chunked(
            request.weights,
            request.several,
            memory=request.memory,
            current=request.current,
            speeds=request.speeds,
        )
        return best.partition
    # Costs given by hand may have no sizes. Layers are counted then.
    sizes = [layer.moved_bytes for layer in request.layers]
    return exact(
        request.weights,
        request.current.stages,
        memory=request.memory,
        current=request.current,
        move_bytes=sizes if any(sizes) else None,
        speeds=request.speeds,
    )


def _schedule_aware(request: BalanceRequest) -> Partition:
    if request.make is None:
        raise PartitionError(
            "the balancer 'schedule-aware' needs the schedule that will run: "
            "give the request a `make`, or take 'exact'"
        )
    return _simulated(request, request.make, ties_only=False)


def _simulated(request: BalanceRequest, make: Make, ties_only: bool) -> Partition:
    problem = PlacementProblem(
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
        ties_only=ties_only,
    )
    return search(problem).partition


def _diffusion(request: BalanceRequest) -> Partition:
    memory = request.memory
    return _fitting(
        request,
        diffuse(request.weights, request.current, fits=memory.fits if memory else None).partition,
    )


def _deepspeed_uniform(request: BalanceRequest) -> Partition:
    return _fitting(
        request,
        placement(
            deepspeed_uniform(len(request.layers), request.current.stages),
            "DeepSpeed's uniform placement",
        ),
    )


def _deepspeed(cost: Cost) -> Balancer:
    def balance(request: BalanceRequest) -> Partition:
        bounds = deepspeed_balanced(weigh(request.layers, cost), request.current.stages)
        return _fitting(request, placement(bounds, f"DeepSpeed's placement by {cost}"))

    return balance


def _deepspeed_type(pattern: str) -> Balancer:
    def balance(request: BalanceRequest) -> Partition:
        bounds = deepspeed_type(request.names, pattern, request.current.stages)
        return _fitting(request, placement(bounds, f"DeepSpeed's placement by type:{pattern}"))

    return balance


def _megatron(embedding: bool, loss: bool) -> Balancer:
    def balance(request: BalanceRequest) -> Partition:
        names = request.names or ("",) * len(request.layers)
        return _fitting(
            request, megatron_uniform(names, request.current.stages, embedding=embedding, loss=loss)
        )

    return balance


def _algorithm_3(request: BalanceRequest) -> Partition:
    sizes = (
        None
        if request.memory_limit is None
        else [x.static_bytes + x.activation_bytes for x in request.layers]
    )
    return in_order(
        published_diffusion(
            request.weights, request.current, layer_bytes=sizes, limits=request.memory_limit
        )
    )


def _random(request: BalanceRequest) -> Partition:
    """Any other placement that fits, each with the same chance. For tests.

    Returns `current` if there is no other. The generator is a hash of (seed, step). It needs no
    state and is the same on every rank.
    """
    layers, ranks, memory = len(request.layers), request.current.stages, request.memory

    def room(stage: int, start: int) -> int:
        last = layers - (ranks - 1 - stage)
        return last if memory is None else min(last, memory.reach(stage, start))

    # ways[stage][start] is the number of placements of the layers from `start` on, on the stages
    # from `stage` on. below[...] are running sums, so that a range of ends is one subtraction.
    ways = [[0] * layers + [1]]
    below: list[list[int]] = []
    for stage in reversed(range(ranks)):
        below.append(list(accumulate(ways[-1], initial=0)))
        ways.append(
            [
                max(0, below[-1][room(stage, start) + 1] - below[-1][start + 1])
                for start in range(layers)
            ]
            + [0]
        )
    ways.reverse()
    below.reverse()
    # Placements are numbered in lexicographic order. The number of the current one is skipped.
    fits = memory is None or all(
        memory.fits(s, span.start, span.stop)
        for s, span in enumerate(map(request.current.range_of, range(ranks)))
    )
    total = ways[0][0] - fits
    if total < 1:
        return _fitting(request, request.current)
    digest = hashlib.sha256(f"balancer random {request.seed} {request.step}".encode()).digest()
    number = int.from_bytes(digest) % total
    bounds = request.current.bounds
    own = sum(below[s][bounds[s + 1]] - below[s][bounds[s] + 1] for s in range(ranks))
    if fits and number >= own:
        number += 1
    picked = [0]
    for stage in range(ranks):
        end = picked[-1] + 1
        while number >= ways[stage + 1][end]:
            number -= ways[stage + 1][end]
            end += 1
        picked.append(end)
    return Partition.from_bounds(picked)


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


BALANCERS: dict[str, Balancer] = {
    "none": _none,
    "uniform": _uniform,
    "exact": _exact,
    "schedule-aware": _schedule_aware,
    "diffusion": _diffusion,
    "random": _random,
    # Baselines: see `baselines`.
    "deepspeed-uniform": _deepspeed_uniform,
    "deepspeed-parameters": _deepspeed("parameters"),
    "deepspeed-time": _deepspeed("time"),
    "megatron-uniform": _megatron(embedding=False, loss=False),
    "megatron-embedding-loss": _megatron(embedding=True, loss=True),
    "algorithm-3": _algorithm_3,
}

# "deepspeed-type:attention" balances the layers whose names match the regular expression after
# the colon.
_BY_TYPE = "deepspeed-type:"


def balancer(name: str) -> Balancer:
    """The balancer called `name`.

    Raises:
        PartitionError: The name is unknown. The message lists the known ones.
    """
    if name.startswith(_BY_TYPE):
        return _deepspeed_type(name.removeprefix(_BY_TYPE))
    if name not in BALANCERS:
        raise PartitionError(f"unknown balancer {name!r}; choose one of {', '.join(BALANCERS)}")
    return BALANCERS[name]
