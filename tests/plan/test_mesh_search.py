from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynmo.cost.layer_cost import LayerCost, LinkCost
from dynmo.cost.profile_file import Profile
from dynmo.errors import InputError, PartitionError
from dynmo.plan.make_plan import make_plan
from dynmo.plan.mesh_plan import Mesh, MeshPlan, add_reductions, mesh_profile
from dynmo.plan.mesh_search import MeshRequest, search
from dynmo.plan.partition import Partition
from dynmo.plan.plan_request import PlanRequest, evaluate_partition
from dynmo.plan.recompute import with_recompute
from dynmo.schedule.bounds import Objective
from dynmo.schedule.memory import rank_memory
from dynmo.schedule.op import Kind


def profile(count: int, seed: int, microbatch: int = 2) -> Profile:
    rng, layers = random.Random(seed), list[LayerCost]()
    for _ in range(count):
        times = (rng.uniform(0.5, 1.5), rng.uniform(0.5, 1.5), rng.uniform(0.2, 1.0))
        layers.append(LayerCost(*times, 10, 40, 40, 80, rng.randint(50, 150), 40, 20))
    links = (((0, 1), LinkCost(0.01, 1e4)),)
    names = tuple(f"blocks.{i}" for i in range(count))
    return Profile(tuple(layers), names, links=links, microbatch=microbatch)


def reduced(plan: MeshPlan, bandwidth: float, zero: int) -> float:
    """A layer's reduction waits for its last W and for the reduction before it."""
    mesh, timeline = plan.mesh, plan.plan.timeline
    ring = (mesh.replicas - 1) / mesh.replicas
    ends: list[float] = []
    gathers: list[float] = []
    for row in timeline.ranks:
        link, size = 0.0, 0
        for op, start, _ in row:
            if op.microbatch != mesh.microbatches - 1 or op.kind not in (Kind.W, Kind.BW):
                continue
            now = start
            for index in reversed(plan.plan.partition.range_of(op.stage)):
                layer = plan.plan.request.layers[index]
                now += layer.w + (layer.b if op.kind is Kind.BW else 0)
                link = max(link, now) + (2 - zero) * ring * layer.gradient_bytes / bandwidth
                size += layer.weight_bytes
        ends.append(max(link, row[-1].end))
        gathers.append(zero * ring * size / bandwidth)
    if plan.plan.request.objective is Objective.MAKESPAN:
        return max(ends) + max(gathers)
    return max(
        e + g - row[0].start for e, g, row in zip(ends, gathers, timeline.ranks, strict=True)
    )


@st.composite
def requests(draw: st.DrawFn) -> MeshRequest:
    request = MeshRequest(
        profile(draw(st.integers(3, 6)), draw(st.integers(0, 10**6))),
        draw(st.sampled_from((1, 2, 4, 6))),
        draw(st.sampled_from((8, 12))),
        draw(st.sampled_from(((), (1,), (1, 2, 4)))),
        draw(st.sampled_from((("zb-h1", "1f1b"), ("zb-h2",), ("1f1b", "zb-v", "zb-h1")))),
        zero=draw(st.integers(0, 1)),
        bandwidth=draw(st.sampled_from((math.inf, 1e3, 30.0))),
        objective=draw(st.sampled_from(Objective)),
    )
    return replace(request, memory_limit=draw(st.one_of(st.none(), st.integers(500, 4000))))


def meshes(request: MeshRequest) -> Iterator[Mesh]:
    """Every mesh of a request. On a single rank only one schedule counts: all do the same."""
    alone = next((x for x in request.schedules if x != "zb-v"), "zb-v")
    for pipeline, size, schedule in product(
        range(1, request.gpus + 1), request.sizes, request.schedules
    ):
        replicas = request.gpus // pipeline
        if pipeline * replicas != request.gpus or request.global_batch % (replicas * size):
            continue
        if pipeline > 1 or schedule == alone:
            microbatches = request.global_batch // replicas // size
            yield Mesh(pipeline, replicas, microbatches, size, schedule)


def fastest(request: MeshRequest, mesh: Mesh) -> float | None:
    """Seconds of a step, by simulation or by the least bottleneck. None if neither fits."""
    plan_request = PlanRequest(
        mesh_profile(request.profile, mesh, request.zero),
        mesh.pipeline,
        mesh.microbatches,
        mesh.schedule,
        memory_limit=request.memory_limit,
        objective=request.objective,
        any_links=True,
        replicas=mesh.replicas,
    )
    seconds: list[float] = []
    for quick in (True, False):
        try:
            plan = make_plan(replace(plan_request, quick=quick))
            seconds.append(add_reductions(mesh, plan, request.bandwidth, request.zero).seconds)
        except InputError:
            continue
    return min(seconds, default=None)


@settings(max_examples=settings().max_examples // 4)
@given(requests())
def test_search_equals_brute_force(request: MeshRequest):
    """Nothing that was passed over is better. Meshes that are refused cannot be had."""
    every = {mesh: fastest(request, mesh) for mesh in meshes(request)}
    best = {mesh: seconds for mesh, seconds in every.items() if seconds is not None}
    if not best:
        with pytest.raises(PartitionError):
            search(request)
        return
    result = search(request)
    seconds = [x.seconds for x in result.candidates]
    found, refused = ({x.mesh for x in some} for some in (result.candidates, result.refused))
    assert seconds == sorted(seconds)
    for x in result.candidates:
        assert (x.mesh.gpus, x.mesh.global_batch) == (request.gpus, request.global_batch)
        assert x.seconds <= best[x.mesh] * (1 + 1e-6)
        assert x.seconds == pytest.approx(reduced(x, request.bandwidth, request.zero))
        assert x.exposed == pytest.approx(x.seconds - x.plan.step, abs=1e-9)
        assert x.samples_per_second == request.global_batch / x.seconds
        assert request.memory_limit is None or max(x.memory) <= request.memory_limit
    assert found | refused >= set(best) or result.slower
    if left := sorted(best[mesh] for mesh in best if mesh not in found):
        assert len(result.candidates) == request.keep
        assert left[0] >= seconds[-1] * (1 - 1e-6)
    assert seconds[0] <= min(best.values()) * (1 + 1e-6)
    assert not refused & set(best)


def test_best_mesh_equals_a_search_of_all_placements():
    """The balancers are exact for equal layers."""
    one = LayerCost(1.0, 1.0, 0.5, 10, 40, 40, 80, 100, 40, 20)
    given = replace(profile(6, 0), layers=(one,) * 6, links=())
    request = MeshRequest(given, 6, 12, (1, 2), ("zb-h1",), bandwidth=100.0)
    best = math.inf
    for pipeline in (1, 2, 3, 6):
        for size in (1, 2):
            mesh = Mesh(pipeline, 6 // pipeline, 2 * pipeline // size, size, "zb-h1")
            plan_request = PlanRequest(
                mesh_profile(given, mesh, 0), pipeline, mesh.microbatches, any_links=True
            )
            for cuts in combinations(range(1, 6), pipeline - 1):
                plan = evaluate_partition(plan_request, Partition.from_bounds((0, *cuts, 6)))
                best = min(best, add_reductions(mesh, plan, 100.0).seconds)
    assert search(request).candidates[0].seconds == pytest.approx(best)


def test_zero_and_bandwidth_decide_the_mesh():
    usual = MeshRequest(profile(8, 1), 4, 16, (1,), ("1f1b", "zb-h1"))
    tight = replace(usual, memory_limit=1500)
    requests = (usual, replace(usual, bandwidth=1.0), tight, replace(tight, zero=1))
    fast, slow, short, zero = (search(request).candidates[0] for request in requests)
    assert (fast.mesh.replicas, fast.exposed) == (4, 0), "without a price, nobody waits"
    assert slow.mesh.replicas == 1
    assert zero.mesh.replicas > short.mesh.replicas
    assert zero.seconds < short.seconds
    assert max(zero.memory) <= 1500


def test_three_best_meshes_are_refined_at_any_size(monkeypatch: pytest.MonkeyPatch):
    refined: list[Mesh] = []

    def refine(_: object, candidate: MeshPlan) -> MeshPlan:
        refined.append(candidate.mesh)
        return candidate

    monkeypatch.setattr("dynmo.plan.mesh_search._REFINED", 0)
    monkeypatch.setattr("dynmo.plan.mesh_search._Search.refine", refine)
    result = search(MeshRequest(profile(8, 1), 4, 16, (1,)))
    assert refined == [x.mesh for x in result.candidates[:3]]


def test_recompute_makes_a_mesh_fit():
    request = MeshRequest(profile(8, 2), 2, 16, (2,), ("1f1b",), memory_limit=1250)
    message = r"over the limit of 1250; .*--recompute auto, --zero 1"
    with pytest.raises(PartitionError, match=message):
        search(request)
    best = search(replace(request, recompute="auto")).candidates[0]
    plan_request = best.plan.request
    assert plan_request.recomputed
    layers = with_recompute(plan_request.kept, plan_request.recomputed)
    assert best.memory == rank_memory(
        layers, best.plan.partition.counts, best.plan.schedule, replicas=plan_request.replicas
    )
    assert max(best.memory) <= 1250
    every = search(replace(request, recompute="all")).candidates[0]
    assert len(every.plan.request.recomputed) == 8
    assert best.seconds <= every.seconds


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpus": 0}, "0 GPUs"),
        ({"global_batch": 0}, "0 sequences in a global batch"),
        ({"global_batch": 10**400}, "at most 9007199254740992"),
        ({"zero": 2}, "zero = 2"),
        ({"bandwidth": 0.0}, "a bandwidth of 0.0 bytes per second"),
        ({"micro_batches": (0,)}, "a microbatch of 0 sequences"),
        ({"profile": replace(profile(4, 0), microbatch=None)}, 'add "microbatch": 1'),
        ({"gpus": 7}, "7 GPUs .* 4 layers .* 7 or 14 or 28"),
        ({"micro_batches": (3,)}, "global batch of 16 .* microbatches of 3; .* multiple of 3"),
        ({"schedules": ("zb-h9",)}, "unknown schedule 'zb-h9'"),
        ({"balancer": "best"}, "unknown balancer 'best'"),
        ({"memory_limit": 100}, r"2 ranks x 2 replicas, .*: memory: rank 0 needs \d+ bytes"),
    ],
)
def test_impossible_requests_are_refused(changes: dict[str, object], message: str):
    with pytest.raises(InputError, match=message):
        search(replace(MeshRequest(profile(4, 0), 4, 16, (1, 2, 4), ("1f1b", "zb-h1")), **changes))  # pyright: ignore[reportArgumentType]
