"""A plan and a run make the same schedule within the same memory caps."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from dynmo.config import parse
from dynmo.cost.costs_file import Profile
from dynmo.cost.layer_cost import LayerCost, elide
from dynmo.pipeline.actions import Actions
from dynmo.plan.evaluate import evaluate
from dynmo.plan.partition import Partition
from dynmo.plan.problem import Choice, Problem, Work
from dynmo.runtime.comm.process_mesh import arrange
from dynmo.runtime.comm.rank_group import RankGroup
from dynmo.runtime.engine.engine import Engine
from dynmo.runtime.options import EngineOptions
from dynmo.schedule.bounds import Objective
from dynmo.train.setup import model_of
from tests.combinations import mostly_matrix
from tests.pool import Pool

SCHEDULES = {"1f1b": 1, "zb-h1": 1, "zb-h2": 1, "zb-auto": 1, "zb-v": 2, "v-half": 2}


def layer(random: Random, sized: bool) -> LayerCost:
    f, b, w = (random.uniform(0.5, 2.0) for _ in range(3))
    if not sized:
        return LayerCost(f, b, w)
    weight, activation = 4 * random.randrange(1, 200), random.randrange(1, 900)
    return LayerCost(
        f,
        b,
        w,
        parameters=weight // 4,
        weight_bytes=weight,
        gradient_bytes=weight,
        optimizer_bytes=2 * weight,
        activation_bytes=activation,
        stash_bytes=random.randrange(activation + 1),
        output_bytes=random.randrange(1, 99),
        workspace_bytes=random.randrange(300),
        forward_workspace_bytes=random.randrange(200),
        weight_workspace_bytes=random.randrange(100),
    )


def cut(random: Random, layers: int, stages: int) -> Partition:
    ends = sorted(random.sample(range(1, layers), stages - 1))
    return Partition.from_bounds((0, *ends, layers))


def compared(world: RankGroup, replicas: int, cases: int) -> list[dict[str, Any]]:
    """Draws costs, a limit and a frozen prefix. Returns what a run and a plan make of each."""
    random, out = Random(replicas), list[dict[str, Any]]()
    world = arrange(world, replicas)
    for _ in range(cases):
        name, ranks = random.choice(list(SCHEDULES)), random.randint(2, 4)
        microbatches, sized = random.randint(ranks, 10), random.random() < 0.8
        count = random.randint(SCHEDULES[name] * ranks, 12)
        partition = cut(random, count, SCHEDULES[name] * ranks)
        frozen = random.choice([0, 0, random.randrange(count)])
        costs = elide([layer(random, sized) for _ in range(count)], frozen, range(frozen))
        limit = random.randrange(4000, 40_000) if sized and random.random() < 0.7 else None
        emulated = {"kind": "emulated", "layers": count, "bytes": 8, **dict.fromkeys("fbw", 0.0)}
        model = model_of(parse({"model": emulated}))
        engine = Engine(
            world,
            model,
            partition,
            EngineOptions(name, microbatches=microbatches, slices=ranks, memory_limit=limit),
        )
        Actions(engine).freeze(range(frozen))
        run = engine.schedule_maker.plan(partition, costs)
        engine.schedule_maker.learn(costs)
        work = Work(Objective.MAKESPAN)
        problem = Problem(Profile(costs, model.names, frozen), work, limit)
        mesh = problem.mesh(ranks, microbatches, name, replicas)
        fits = limit is None or max(run.memory) <= limit
        said: dict[str, Any] = {
            "case": f"{name} {partition.counts} x {microbatches}, {frozen} frozen, limit {limit}",
            "limited": limit is not None,
            "fits": fits,
            "run": (str(engine.schedule_maker.on(partition)), run.caps, run.memory),
        }
        plan = evaluate(problem, Choice(mesh, partition))
        said["plan"] = (str(plan.schedule), plan.caps, plan.memory)
        if plan.beyond:
            said["refused"] = True
        out.append(said)
    return out


@pytest.mark.parametrize(
    ("replicas", "cases"), mostly_matrix([(1, 120), (2, 60), (2, 30)], everyday=[(2, 30)])
)
def test_plan_and_run_make_the_same_schedule(pool: Pool, replicas: int, cases: int) -> None:
    job = "tests.pipeline.test_plan_agrees:compared"
    results = pool.run(job, replicas, replicas=replicas, cases=cases)
    for said in results[0]:
        assert said["plan"] == said["run"], said["case"]
        assert said.get("refused", False) is not said["fits"], said["case"]
    limited = [said["fits"] for said in results[0] if said["limited"]]
    assert min(limited.count(True), limited.count(False)) >= cases // 12
