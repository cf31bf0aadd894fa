"""The search for a mesh, compared with all meshes."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynmo.cost.costs_file import Profile
from dynmo.cost.layer_cost import LayerCost, LinkCost
from dynmo.errors import InputError, PartitionError
from dynmo.plan.best import NoMeshFitsError, least_seconds, plan_on, search
from dynmo.plan.evaluate import Plan, evaluate
from dynmo.plan.partition import Partition
from dynmo.plan.problem import UNKNOWN_SIZE, Allowed, Choice, Mesh, Problem, Work
from dynmo.plan.recompute import with_recompute
from dynmo.schedule.bounds import Objective
from dynmo.schedule.memory import rank_memory
from dynmo.schedule.op import Kind

Asked = tuple[Problem, Allowed]
UNSIZED = LayerCost(1.0, 1.0, 1.0)


def profile(count: int, seed: int, microbatch: int | None = 2) -> Profile:
    rng, layers = random.Random(seed), list[LayerCost]()
    for _ in range(count):
        times = (rng.uniform(0.5, 1.5), rng.uniform(0.5, 1.5), rng.uniform(0.2, 1.0))
        layers.append(LayerCost(*times, 10, 40, 40, 80, rng.randint(50, 150), 40, 20))
    links = (((0, 1), LinkCost(0.01, 1e4)),)
    names = tuple(f"blocks.{i}" for i in range(count))
    return Profile(tuple(layers), names, links=links, microbatch=microbatch)


def reduced(plan: Plan) -> float:
    """A layer's reduction waits for its last W and for the reduction before it."""
    mesh, timeline, zero = plan.mesh, plan.timeline, plan.problem.work.zero
    ring = (mesh.replicas - 1) / mesh.replicas / plan.problem.bandwidth
    ends: list[float] = []
    gathers: list[float] = []
    for row in timeline.ranks:
        link, size = 0.0, 0
        for op, start, _ in row:
            if op.microbatch != mesh.microbatches - 1 or op.kind not in (Kind.W, Kind.BW):
                continue
            now = start
            for index in reversed(plan.partition.range_of(op.stage)):
                layer = plan.layers[index]
                now += layer.w + (layer.b if op.kind is Kind.BW else 0)
                link = max(link, now) + (2 - zero) * ring * layer.gradient_bytes
                size += layer.weight_bytes
        ends.append(max(link, row[-1].end))
        gathers.append(zero * ring * size)
    if plan.problem.work.objective is Objective.MAKESPAN:
        return max(ends) + max(gathers)
    return max(
        e + g - row[0].start for e, g, row in zip(ends, gathers, timeline.ranks, strict=True)
    )


@st.composite
def questions(draw: st.DrawFn) -> Asked:
    work = Work(draw(st.sampled_from(Objective)), zero=draw(st.integers(0, 1)))
    problem = Problem(
        profile(draw(st.integers(3, 6)), draw(st.integers(0, 10**6))),
        work,
        draw(st.one_of(st.none(), st.integers(500, 4000))),
        bandwidth=draw(st.sampled_from((math.inf, 1e3, 30.0))),
    )
    allowed = Allowed(
        draw(st.sampled_from((1, 2, 4, 6))),
        draw(st.sampled_from((8, 12))),
        draw(st.sampled_from(((), (1,), (1, 2, 4)))),
        draw(st.sampled_from((("zb-h1", "1f1b"), ("zb-h2",), ("1f1b", "zb-v", "zb-h1")))),
    )
    return problem, allowed


def meshes(problem: Problem, allowed: Allowed) -> Iterator[Mesh]:
    """Every mesh that is allowed. On a single rank only one schedule counts: all do the same."""
    alone = next((x for x in allowed.schedules if x != "zb-v"), "zb-v")
    # Half and a quarter of the measured 2, which must be whole, and its doubles.
    sizes = allowed.sizes or tuple(x for x in (1, 2, 4, 8) if allowed.batch % x == 0)
    assert problem.size == 2
    for pipeline, size, schedule in product(range(1, allowed.gpus + 1), sizes, allowed.schedules):
        replicas = allowed.gpus // pipeline
        if pipeline * replicas != allowed.gpus or allowed.batch % (replicas * size):
            continue
        if pipeline > 1 or schedule == alone:
            yield Mesh(pipeline, replicas, allowed.batch // replicas // size, size, schedule)


def fastest(problem: Problem, mesh: Mesh, allowed: Allowed) -> float | None:
    """Seconds of a step, by simulation or by the least bottleneck. None if neither fits."""
    seconds: list[float] = []
    for quick in (True, False):
        try:
            seconds.append(plan_on(problem, mesh, allowed, quick=quick).check_room().seconds)
        except InputError:
            continue
    return min(seconds, default=None)


@settings(max_examples=settings().max_examples // 4)
@given(questions())
def test_search_equals_brute_force(asked: Asked) -> None:
    """Nothing that was passed over is better. Meshes that are refused cannot be had."""
    problem, allowed = asked
    every = {mesh: fastest(problem, mesh, allowed) for mesh in meshes(*asked)}
    best = {mesh: seconds for mesh, seconds in every.items() if seconds is not None}
    if not best:
        with pytest.raises(PartitionError):
            search(*asked)
        return
    result = search(*asked)
    seconds = [x.seconds for x in result.plans]
    found, refused = ({x.mesh for x in some} for some in (result.plans, result.refused))
    assert seconds == sorted(seconds)
    for x in result.plans:
        assert (x.mesh.gpus, x.mesh.global_batch) == (allowed.gpus, allowed.batch)
        assert x.seconds <= best[x.mesh] * (1 + 1e-6)
        assert x.seconds == pytest.approx(reduced(x))
        assert x.exposed == pytest.approx(x.seconds - x.step, abs=1e-9)
        assert x.samples_per_second == allowed.batch / x.seconds
        assert not isinstance(problem.memory_limit, int) or max(x.memory) <= problem.memory_limit
    assert found | refused >= set(best) or result.slower
    if left := sorted(best[mesh] for mesh in best if mesh not in found):
        assert len(result.plans) == allowed.keep
        assert left[0] >= seconds[-1] * (1 - 1e-6)
    assert seconds[0] <= min(best.values()) * (1 + 1e-6)
    assert seconds[0] >= least_seconds(*asked)
    assert not refused & set(best)


def test_best_mesh_equals_a_search_of_all_placements() -> None:
    """The balancers are exact for equal layers."""
    one = LayerCost(1.0, 1.0, 0.5, 10, 40, 40, 80, 100, 40, 20)
    given = replace(profile(6, 0), layers=(one,) * 6, links=())
    problem, allowed = Problem(given, bandwidth=100.0), Allowed(6, 12, (1, 2), ("zb-h1",))
    best = math.inf
    for pipeline in (1, 2, 3, 6):
        for size in (1, 2):
            mesh = Mesh(pipeline, 6 // pipeline, 2 * pipeline // size, size, "zb-h1")
            for cuts in combinations(range(1, 6), pipeline - 1):
                choice = Choice(mesh, Partition.from_bounds((0, *cuts, 6)))
                best = min(best, evaluate(problem, choice).seconds)
    assert search(problem, allowed).plans[0].seconds == pytest.approx(best)


def test_reductions_are_those_of_each_layer() -> None:
    """Two layers of F = B = W = 1 second and 40 bytes, on 4 replicas with 2 bytes per second.

    A ring takes 30 seconds for an all-reduce of 40 bytes, and 15 for each half of it.
    """
    one = LayerCost(1.0, 1.0, 1.0, 10, 40, 40, 80, 100, 40, 20)
    known = Profile((one, one), ("a", "b"), microbatch=1)
    for zero, groups in product((0, 1), (None, 4, 8)):
        work = Work(zero=zero, accumulation_groups=groups)
        problem = Problem(known, work, bandwidth=2.0)
        plan = evaluate(problem, Choice(Mesh(1, 4, 2, 1, "1f1b"), Partition((2,))))
        # The first of the two begins when the last layer's W ends, 2 seconds before the step does.
        assert (plan.step, plan.exposed) == (12.0, 58.0)
        assert plan.seconds == reduced(plan)
        alone = evaluate(problem, Choice(Mesh(1, 1, 2, 1, "1f1b"), Partition((2,))))
        assert (alone.seconds, alone.exposed) == (12.0, 0.0)


def test_zero_and_bandwidth_decide_the_mesh() -> None:
    usual, allowed = Problem(profile(8, 1)), Allowed(4, 16, (1,), ("1f1b", "zb-h1"))
    tight = replace(usual, memory_limit=1500)
    problems = (usual, replace(usual, bandwidth=1.0), tight, replace(tight, work=Work(zero=1)))
    fast, slow, short, zero = (search(problem, allowed).plans[0] for problem in problems)
    assert (fast.mesh.replicas, fast.exposed) == (4, 0), "without a price, nobody waits"
    assert slow.mesh.replicas == 1
    assert zero.mesh.replicas > short.mesh.replicas
    assert zero.seconds < short.seconds
    assert max(zero.memory) <= 1500
    optimizer = {layer.optimizer_bytes for layer in zero.layers}
    assert optimizer == {math.ceil(80 / zero.mesh.replicas)}


def test_three_best_meshes_are_refined_at_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    refined: list[Mesh] = []

    def refine(_: object, plan: Plan) -> Plan:
        refined.append(plan.mesh)
        return plan

    monkeypatch.setattr("dynmo.plan.best._REFINED", 0)
    monkeypatch.setattr("dynmo.plan.best._Search.refine", refine)
    asked = Problem(profile(8, 1)), Allowed(4, 16, (1,))
    result = search(*asked)
    assert refined == [x.mesh for x in result.plans[:3]]
    assert len(search(*asked, quick=True).plans) == len(result.plans)
    assert len(refined) == 3


def test_quick_search_takes_no_less_time() -> None:
    problem, allowed = Problem(profile(9, 3), bandwidth=100.0), Allowed(6, 24, keep=3)
    quick, best = search(problem, allowed, quick=True), search(problem, allowed)
    assert best == search(problem, allowed)
    assert len(quick.plans) == len(best.plans) == 3
    assert best.plans[0].seconds <= quick.plans[0].seconds
    assert best.slower > 0
    assert best.plans[0].seconds >= least_seconds(problem, allowed)
    one = search(problem, replace(allowed, keep=1))
    assert one.plans[0].mesh in {plan.mesh for plan in best.plans}


def test_meshes_keep_to_what_is_allowed() -> None:
    problem, allowed = Problem(profile(8, 1)), Allowed(4, 16, (1, 2), ("1f1b",), replicas=(2,))
    result = search(problem, allowed)
    assert {(x.mesh.replicas, x.mesh.schedule) for x in result.plans} == {(2, "1f1b")}
    assert {x.mesh.micro_batch for x in result.plans} == {1, 2}
    reasons = {x.mesh.replicas: x.reason for x in result.refused}
    assert reasons == {1: "1 replicas are none of 2", 4: "4 replicas are none of 2"}
    uniform = search(problem, replace(allowed, balancer="uniform")).plans
    assert {x.partition.counts for x in uniform} == {(4, 4)}


def test_a_mesh_of_another_size_has_costs_in_proportion() -> None:
    problem = Problem(profile(8, 1))
    for size in (1, 4):
        mesh = Mesh(2, 1, 8, size, "1f1b")
        plan = plan_on(problem, mesh, Allowed(2, 8 * size))
        assert plan.layers[0].f == problem.layers[0].f * size / 2
        assert plan.layers[0].weight_bytes == problem.layers[0].weight_bytes
    unknown = Problem(profile(8, 1, microbatch=None))
    assert unknown.mesh(2, 8, "1f1b").micro_batch == UNKNOWN_SIZE
    plan = plan_on(unknown, unknown.mesh(2, 8, "1f1b"), Allowed(2, 8))
    assert plan.layers == unknown.layers


def test_recompute_makes_a_mesh_fit() -> None:
    problem = Problem(profile(8, 2), memory_limit=1250)
    allowed = Allowed(2, 16, (2,), ("1f1b",))
    message = r"over the limit of 1250; .*--recompute auto, --zero 1"
    with pytest.raises(NoMeshFitsError, match=message) as error:
        search(problem, allowed)
    closest = error.value.closest
    assert closest is not None
    assert closest.need is not None
    assert closest.need > 1250
    assert error.value.shortage.startswith(f"as {closest.mesh}, rank ")
    best = search(problem, replace(allowed, recompute="auto")).plans[0]
    assert best.recomputed
    layers = with_recompute(best.replica.layers, best.recomputed)
    assert best.memory == rank_memory(
        layers, best.partition.counts, best.schedule, replicas=best.mesh.replicas
    )
    assert max(best.memory) <= 1250
    every = search(problem, replace(allowed, recompute="all")).plans[0]
    assert len(every.recomputed) == 8
    assert best.seconds <= every.seconds
    for balancer in ("uniform", "diffusion"):
        other = replace(allowed, recompute="auto", balancer=balancer)
        plan = search(problem, other).plans[0]
        assert 0 < len(plan.recomputed) < 8
        assert best.seconds <= plan.seconds


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 10**400}, "at most 9007199254740992"),
        ({"profile": profile(4, 0, microbatch=None)}, 'add "microbatch": 1'),
        ({"gpus": 7}, "7 GPUs .* 4 layers .* 7 or 14 or 28"),
        ({"sizes": (3,)}, "global batch of 16 .* microbatches of 3; .* multiple of 3"),
        ({"replicas": (8,)}, "4 ranks have no mesh: .* 4 layers, .* replicas may be 8"),
        ({"schedules": ("zb-h9",)}, "unknown schedule 'zb-h9'"),
        ({"balancer": "best"}, "unknown balancer 'best'"),
        ({"memory_limit": 100}, r"2 ranks x 2 replicas, .*: memory: rank 0 needs \d+ bytes"),
        (
            {
                "profile": replace(profile(4, 0), layers=(LayerCost(1, 1, 1),) * 4),
                "memory_limit": 9,
            },
            "a memory limit, but the costs have no sizes",
        ),
        ({"bandwidth": 5e-324, "replicas": (2, 4)}, "at 5e-324 bytes per second a step"),
    ],
)
def test_impossible_questions_are_refused(changes: dict[str, Any], message: str) -> None:
    problem = Problem(profile(4, 0))
    allowed = Allowed(4, 16, (1, 2, 4), ("1f1b", "zb-h1"))
    known = {key: value for key, value in changes.items() if hasattr(problem, key)}
    limits = {key: value for key, value in changes.items() if key not in known}
    if changes.get("bandwidth"):
        limits["replicas"] = (2, 4)
    with pytest.raises(InputError, match=message) as error:
        search(replace(problem, **known), replace(allowed, **limits))
    assert "\n" not in str(error.value)
