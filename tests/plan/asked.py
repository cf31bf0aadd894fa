"""A problem, a mesh and what is allowed, from the arguments that `dynmo plan` has."""

from __future__ import annotations

from typing import Any

from dynmo.cost.costs_file import Profile
from dynmo.plan.best import plan_on
from dynmo.plan.evaluate import Plan
from dynmo.plan.problem import Allowed, Mesh, Problem, RecomputeMode, Speeds, Work
from dynmo.schedule.memory import Limit

Asked = tuple[Problem, Mesh, Allowed]


def ask(
    profile: Profile,
    ranks: int,
    microbatches: int,
    schedule: str = "zb-h1",
    *,
    balancer: str = "exact",
    recompute: RecomputeMode = "none",
    memory_limit: Limit = None,
    speeds: Speeds | None = None,
    **work: Any,
) -> Asked:
    problem = Problem(profile, Work(**work), memory_limit, speeds)
    mesh = problem.mesh(ranks, microbatches, schedule)
    return problem, mesh, Allowed(ranks, 1, balancer=balancer, recompute=recompute)


def made(profile: Profile, ranks: int, microbatches: int, *schedule: str, **known: Any) -> Plan:
    """The plan, which fits the memory."""
    return plan_on(*ask(profile, ranks, microbatches, *schedule, **known)).check_room()
