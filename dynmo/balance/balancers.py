"""The balancers by name: pure functions from a request to a `Partition`, the same on every rank that asks the same."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from dynmo.balance.diffusion import diffuse
from dynmo.balance.partition import Cost, Partition, exact, uniform, weigh
from dynmo.costs import LayerCost
from dynmo.errors import PartitionError
from dynmo.memory import MemoryLimits, Pairs


@dataclass(frozen=True)
class BalanceRequest:
    """Where the layers are and what they cost.

    `resident` (from `simulator.resident`, of the schedule that will run) and `memory_limit` (bytes) have one entry per stage; a limit needs
    both, and without them memory is not looked at. `seed` and `step` key what is random.
    """

    layers: tuple[LayerCost, ...]
    current: Partition
    cost: Cost = "time"
    resident: tuple[Pairs, ...] | None = None
    memory_limit: tuple[int, ...] | None = None
    seed: int = 0
    step: int = 0

    def __post_init__(self) -> None:
        if len(self.layers) != self.current.layers:
            raise PartitionError(f"a placement of {self.current.layers} layers for {len(self.layers)} layer costs")
        if self.memory_limit is not None:
            if self.resident is None:
                raise PartitionError("a memory limit needs the schedule's resident microbatches too; give both or neither")
            for what, count in (("memory limits", len(self.memory_limit)), ("resident stages", len(self.resident))):
                if count != self.current.ranks:
                    raise PartitionError(f"{count} {what} for {self.current.ranks} ranks; give one per rank")

    @property
    def weights(self) -> tuple[float, ...]:
        return weigh(self.layers, self.cost)

    @cached_property
    def memory(self) -> MemoryLimits | None:
        if self.memory_limit is None or self.resident is None:
            return None
        return MemoryLimits(self.layers, self.resident, self.memory_limit)


Balancer = Callable[[BalanceRequest], Partition]
"""Returns a placement on as many ranks as `current` has; PartitionError where what it stands for does not fit the memory."""


def _none(request: BalanceRequest) -> Partition:
    """The placement as it is, whether it fits or not."""
    return request.current


def _uniform(request: BalanceRequest) -> Partition:
    return _fitting(request, uniform(len(request.layers), request.current.ranks))


def _exact(request: BalanceRequest) -> Partition:
    sizes = [layer.static_bytes for layer in request.layers]
    return exact(
        request.weights,
        request.current.ranks,
        memory=request.memory,
        current=request.current,
        move_bytes=sizes if any(sizes) else None,  # costs given by hand may have none: then layers are counted
    )


def _diffusion(request: BalanceRequest) -> Partition:
    memory = request.memory
    return _fitting(request, diffuse(request.weights, request.current, fits=memory.fits if memory else None).partition)


def _random(request: BalanceRequest) -> Partition:
    """Forced moves, for testing: any other placement that fits, each with the same chance; `current` where there is no other.

    The generator is a hash of (seed, step): nothing to carry along, and the same on every rank.
    """
    layers, ranks, memory = len(request.layers), request.current.ranks, request.memory

    def room(stage: int, start: int) -> int:
        last = layers - (ranks - 1 - stage)
        return last if memory is None else min(last, memory.reach(stage, start))

    # ways[stage][start]: in how many ways the stages from there on can hold the layers from there on. below[...] are their running
    # sums, so that a range of ends is one subtraction.
    ways = [[0] * layers + [1]]
    below: list[list[int]] = []
    for stage in reversed(range(ranks)):
        below.append(list(accumulate(ways[-1], initial=0)))
        ways.append([max(0, below[-1][room(stage, start) + 1] - below[-1][start + 1]) for start in range(layers)] + [0])
    ways.reverse()
    below.reverse()
    # The placements in lexicographic order have numbers; the current one's is skipped.
    fits = memory is None or all(
        memory.fits(s, span.start, span.stop) for s, span in enumerate(map(request.current.range_of, range(ranks)))
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
    """`partition`, or PartitionError naming its first stage that does not fit."""
    memory = request.memory
    if memory is None:
        return partition
    for stage in range(partition.ranks):
        span = partition.range_of(stage)
        need, limit = memory.need(stage, span.start, span.stop), memory.limits[stage]
        if need > limit:
            raise PartitionError(
                f"stage {stage} of the placement {partition.counts} needs {need} bytes, its limit is {limit}; "
                "take the balancer 'exact', which looks for a placement that fits"
            )
    return partition


BALANCERS: dict[str, Balancer] = {
    "none": _none,
    "uniform": _uniform,
    "exact": _exact,
    "diffusion": _diffusion,
    "random": _random,
}

# A word of the contract that a later version serves: naming it is an error that says so, not a typing mistake.
PLANNED = ("schedule-aware",)


def balancer(name: str) -> Balancer:
    """The balancer called `name`. Raises PartitionError listing the known ones."""
    if name in PLANNED:
        raise PartitionError(f"balancer {name!r} is not served by this version; choose one of {', '.join(BALANCERS)}")
    if name not in BALANCERS:
        raise PartitionError(f"unknown balancer {name!r}; choose one of {', '.join(BALANCERS)}")
    return BALANCERS[name]
