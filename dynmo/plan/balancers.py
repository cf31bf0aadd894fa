"""The balancers by name: pure functions from a problem and the present plan to a placement.

Every rank that asks the same gets the same answer.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache

from dynmo.cost.layer_cost import LayerCost
from dynmo.cost.profile_file import Profile
from dynmo.errors import ConfigError, PartitionError, ScheduleError
from dynmo.options import OWN, find_own
from dynmo.plan.diffusion import diffuse
from dynmo.plan.evaluate import Plan, evaluate
from dynmo.plan.options import BALANCERS, OWN_BALANCER
from dynmo.plan.partition import Partition, uniform, weigh
from dynmo.plan.placement import place
from dynmo.plan.problem import Choice, Mesh, Problem
from dynmo.schedule.memory import MemoryLimits
from dynmo.schedule.simulator import resident

Balancer = Callable[[Problem, Plan], Partition]
"""Takes what is known and the plan that runs now, and returns a placement on as many stages.

Costs are `now.layers`, the present placement is `now.partition`. Raises PartitionError if it has no
placement."""

SLOW = 0.1
"""A link is slow if a message takes this share of the mean stage's time."""


def _none(problem: Problem, now: Plan) -> Partition:
    return now.partition


def _uniform(problem: Problem, now: Plan) -> Partition:
    return uniform(len(now.layers), now.partition.stages)


def _exact(problem: Problem, now: Plan) -> Partition:
    return place(problem, now.mesh, now.partition).check_room().partition


def _diffusion(problem: Problem, now: Plan) -> Partition:
    replica, layers = now.replica, now.layers
    weights, limits = weigh(layers, problem.work.cost), replica.limits
    fits = None
    if limits is not None:
        own = tuple(limits[rank] for rank in replica.stage_ranks)
        fits = MemoryLimits(layers, resident(now.schedule), own).fits
    plain = diffuse(weights, now.partition, fits=fits).partition
    sizes = [layer.output_bytes for layer in layers]
    slowest = max((link.seconds(max(sizes)) for link in replica.links), default=0.0)
    several = len(replica.stage_ranks) > now.mesh.pipeline
    slow = slowest > SLOW * math.fsum(weights) / now.partition.stages
    if problem.work.cost != "time" or several or not slow:
        return plain
    linked = diffuse(weights, now.partition, fits=fits, links=replica.links, output_bytes=sizes)
    plans = [_with(now, plain)]
    with suppress(ScheduleError):  # say, the memory holds no such schedule
        plans.append(_with(now, linked.partition))
    return min(plans, key=lambda plan: plan.rank).partition


def _with(now: Plan, partition: Partition) -> Plan:
    return evaluate(now.problem, replace(now.choice, partition=partition))


_DYNMOS: dict[str, Balancer] = {
    "none": _none,
    "uniform": _uniform,
    "exact": _exact,
    "diffusion": _diffusion,
}


def balancer(name: str) -> Balancer:
    """The balancer called `name`: one of BALANCERS, or your own by `python:package.module:NAME`.

    Your own is imported, and tried on a small problem.

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


@cache
def _own(name: str) -> Balancer:
    given = find_own("balancer", name)
    kinds = list[object]()
    with suppress(ValueError, TypeError):  # a callable without a signature
        kinds += [x.kind for x in inspect.signature(given).parameters.values()]
    if len(kinds) == 1 and kinds[0] is not inspect.Parameter.VAR_POSITIONAL:
        raise ConfigError(
            f"balancer {name!r} takes one argument, as in earlier versions; write "
            "(problem, now) -> Partition: costs are now.layers, and the present placement is "
            "now.partition"
        )

    def balance(problem: Problem, now: Plan) -> Partition:
        partition, layers, stages = given(problem, now), len(now.layers), now.partition.stages
        if not isinstance(partition, Partition) or (layers, stages) != (
            partition.layers,
            partition.stages,
        ):
            raise ConfigError(
                f"balancer {name!r}: returned {partition!r}; return a Partition of all {layers} "
                f"layers on {stages} stages"
            )
        return partition

    profile = Profile((LayerCost(1.0, 1.0, 1.0),) * 4, ("0", "1", "2", "3"), microbatch=1)
    trial = Problem(profile)
    with suppress(PartitionError):  # it has no placement of these layers
        balance(trial, evaluate(trial, Choice(Mesh(2, 1, 4, 1, "1f1b"), Partition((3, 1)))))
    return balance
