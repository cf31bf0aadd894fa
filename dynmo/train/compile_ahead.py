"""`python -m dynmo.train.compile_ahead` compiles dynmo's loops as a part of the set-up.

numba keeps the machine code of the loops of dynamic cases and of planning. Without it all ranks of
a first run would wait for the compiler at once, in a step or in a decision.

`python -m dynmo.train.compile_ahead zb-h1` compiles the loops that plan this schedule with the
exact balancer, and no others.
"""

from __future__ import annotations

import sys

import torch

from dynmo.cases import CASES
from dynmo.cost.costs_file import Profile
from dynmo.cost.layer_cost import LayerCost, uniform_costs
from dynmo.plan.best import plan_on
from dynmo.plan.problem import Allowed, Problem
from dynmo.schedule.catalogue import make


def prepare() -> None:
    torch.set_num_threads(1)
    for options in CASES.values():
        options.compile_ahead()
    for schedule in ("zb-h1", "zb-auto", "zb-v", "v-auto", "interleaved-1f1b"):
        for balancer in ("exact", "diffusion"):
            for limit in (None, 1 << 20):
                plan(schedule, balancer, limit)
    # No schedule meets the bound here, so the search goes on to the order of single ops.
    make("zb-auto", 2, 3, costs=uniform_costs(2, 2.0, 1.0, 3.0, 0.5), caps=(1.0, 1.0))


def plan(schedule: str, balancer: str = "exact", limit: int | None = None) -> None:
    layers = tuple(
        LayerCost(
            1.0 + i * i % 7,
            1.0,
            1.0,
            weight_bytes=1,
            activation_bytes=2,
            stash_bytes=1,
            output_bytes=1,
        )
        for i in range(12)
    )
    profile = Profile(layers, tuple(map(str, range(len(layers)))))
    problem = Problem(profile, memory_limit=limit)
    plan_on(problem, problem.mesh(3, 6, schedule), Allowed(3, 1, balancer=balancer))


if __name__ == "__main__":
    if schedules := sys.argv[1:]:
        for schedule in schedules:
            plan(schedule)
    else:
        prepare()
