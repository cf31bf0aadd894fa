"""Plans: their schedules, seconds and bytes, and that they fit what there is."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynmo.cost.costs_file import Profile
from dynmo.cost.layer_cost import Costs, LayerCost, LinkCost, stage_costs
from dynmo.errors import InputError, PartitionError
from dynmo.plan.best import plan_on
from dynmo.plan.costs import frozen_stages, pipeline_costs
from dynmo.plan.evaluate import Plan, Replica, evaluate
from dynmo.plan.partition import Partition, uniform
from dynmo.plan.problem import Choice
from dynmo.plan.recompute import with_recompute
from dynmo.schedule.catalogue import SCHEDULES, make, stage_ranks_of
from dynmo.schedule.memory import bare, rank_memory, static_bytes
from dynmo.schedule.op import Schedule
from dynmo.schedule.simulator import peak_memory, resident, simulate
from tests.combinations import mostly_matrix
from tests.plan.asked import ask, made


def profile(count: int = 12, seed: int = 0, frozen: int = 0) -> Profile:
    rng = random.Random(seed)
    layers: list[LayerCost] = []
    for i in range(count):
        f, b, w = (rng.uniform(0.5, 1.5) for _ in range(3))
        if i < frozen:
            b = w = 0.0
        layers.append(LayerCost(f, b, w, 100, 400, 400, 800, rng.randint(50, 150), 40, 10))
    link = LinkCost(0.01, 1e4)
    return Profile(
        tuple(layers),
        tuple(f"blocks.{i // 2}.{i % 2}" for i in range(count)),
        frozen,
        links=(((0, 1), link),),
        microbatch=4,
    )


def test_plans_avoid_a_slow_link() -> None:
    layers = (LayerCost(1.0, 1.0, 1.0, output_bytes=1),) * 24
    fast, slow = LinkCost(0.0, 1e9), LinkCost(8.0, 1e9)
    links = (((0, 1), fast), ((1, 2), slow), ((2, 3), fast))
    known = Profile(layers, tuple(map(str, range(24))), links=links)

    steps = [made(known, 4, 8, balancer=name).step for name in ("uniform", "exact", "diffusion")]
    assert steps == pytest.approx([214, 205, 205])


@pytest.mark.parametrize(
    "schedule",
    mostly_matrix(["1f1b", "zb-auto", "zb-v", "interleaved-1f1b"], everyday=["zb-v", "1f1b"]),
)
def test_a_slow_rank_gets_less_work(schedule: str) -> None:
    plan = made(profile(24), 3, 6, schedule, speeds=(1.0, 0.5, 1.0))
    even = evaluate(plan.problem, Choice(plan.mesh, plan.replica.current))
    assert plan.step < 0.85 * even.step
    work = [cost * speed for cost, speed in zip(plan.rank_cost, (1, 0.5, 1), strict=True)]
    assert work[1] < 0.7 * min(work[0], work[2])
    assert plan.lower_bound <= plan.step


@pytest.mark.parametrize(
    ("schedule", "recompute"),
    mostly_matrix(
        product(("1f1b", "zb-auto", "zb-v"), ("none", "auto")),
        everyday=[("1f1b", "auto"), ("zb-auto", "none")],
    ),
)
def test_each_rank_keeps_within_its_own_limit(schedule: str, recompute: Any) -> None:
    asked = profile(24), 3, 6, schedule
    free = made(*asked)
    limits = (2 * max(free.memory), min(free.memory) * 4 // 5, 2 * max(free.memory))
    plan = made(*asked, memory_limit=limits, recompute=recompute)
    assert all(need <= limit for need, limit in zip(plan.memory, limits, strict=True))
    alike = made(*asked, memory_limit=(limits[0],) * 3, recompute=recompute)
    assert alike.partition == made(*asked, memory_limit=limits[0], recompute=recompute).partition


def test_speeds_and_limits_are_one_per_rank() -> None:
    for known in ({"speeds": (1.0,)}, {"speeds": (1.0, 0.0)}, {"memory_limit": (1, 2, 3)}):
        with pytest.raises(PartitionError, match=r"2 ranks|rank 1"):
            made(profile(), 2, 4, **known)


def every(layers: int, stages: int) -> list[tuple[int, ...]]:
    """Every placement's counts."""
    return [
        tuple(b - a for a, b in pairwise((0, *cuts, layers)))
        for cuts in combinations(range(1, layers), stages - 1)
    ]


def bound(layers: Sequence[LayerCost], counts: tuple[int, ...], schedule: Schedule) -> int:
    """Bytes of the fullest rank, as balancers count them, or as in a run if that is more."""
    live = peak_memory(schedule, Costs(stage_costs(layers, counts), (0.0,) * (len(counts) - 1)))
    static = static_bytes(layers, counts, schedule.stage_ranks)
    counted = [held + round(peak) for held, peak in zip(static, live, strict=True)]
    return max(*counted, *rank_memory(layers, counts, schedule))


def bound_of(plan: Plan) -> int:
    return bound(plan.layers, plan.partition.counts, plan.schedule)


def replayed(plan: Plan) -> None:
    """The figures of the plan, checked from its placement and its schedule alone."""
    timeline = simulate(plan.schedule, plan.costs)
    assert (timeline.span, timeline.makespan) == (plan.timeline.span, plan.timeline.makespan)
    assert plan.lower_bound <= plan.step
    assert sum(plan.partition.counts) == len(plan.layers)
    assert plan.schedule.stage_ranks == plan.stage_ranks
    stages = stage_costs(plan.layers, plan.partition.counts)
    assert plan.costs.stages == stages
    assert plan.memory == rank_memory(plan.layers, plan.partition.counts, plan.schedule)
    # By the simulator: never less than what is live beside weights and optimizer state.
    held = static_bytes(bare(plan.layers), plan.partition.counts, plan.stage_ranks)
    live = peak_memory(plan.schedule, plan.costs)
    assert all(
        need >= own + peak - 1e-6 for need, own, peak in zip(plan.memory, held, live, strict=True)
    )
    assert not plan.beyond


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "interleaved-1f1b"])
@pytest.mark.parametrize("frozen", mostly_matrix([0, 5], everyday=[5]))
def test_plan_with_every_schedule_is_consistent(schedule: str, frozen: int) -> None:
    replayed(made(profile(frozen=frozen), 3, 6, schedule))


def test_plan_with_interleaved_stages_is_consistent() -> None:
    replayed(made(profile(), 3, 6, "interleaved-1f1b", chunks=3))


@pytest.mark.parametrize("seed", range(12))
def test_quick_plan_has_the_least_bottleneck_that_fits(seed: int) -> None:
    """The plan is compared with all placements, with the memory of 1F1B's stages."""
    rng, known = random.Random(seed), profile(9, seed)
    ranks, microbatches = rng.randint(2, 4), rng.randint(1, 8)
    schedule = make("1f1b", ranks, microbatches)
    needs = {counts: bound(known.layers, counts, schedule) for counts in every(9, ranks)}
    limit = sorted(needs.values())[len(needs) // rng.choice([20, 5, 2])]
    loads = {
        counts: max(x.seconds for x in stage_costs(known.layers, counts))
        for counts in needs
        if needs[counts] <= limit
    }
    plan = plan_on(*ask(known, ranks, microbatches, "1f1b", memory_limit=limit), quick=True)
    assert loads[plan.partition.counts] == pytest.approx(min(loads.values()), rel=1e-12)
    assert bound_of(plan) == needs[plan.partition.counts]
    replayed(plan)


@pytest.mark.parametrize("seed", range(2))
def test_automatic_schedules_keep_within_the_limit(seed: int) -> None:
    known = profile(12, seed)
    least = bound_of(made(known, 3, 6, "1f1b"))
    plan = made(known, 3, 6, "zb-auto", memory_limit=least)
    replayed(plan)
    # There is room for one microbatch at a time where 1F1B's three would not fit.
    more = 2 * 5 * 10  # of the other five, messages of 10 bytes wait on both sides
    tight = bound_of(made(known, 3, 1, "1f1b")) + more
    assert tight < least
    replayed(made(known, 3, 6, "zb-auto", memory_limit=tight))


@pytest.mark.parametrize("seed", mostly_matrix(range(12), everyday=range(2)))
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-h2", "zb-v", "v-auto", "v-half"])
def test_plan_exists_if_a_placement_fits(schedule: str, seed: int) -> None:
    """A rank keeps less than the sum of its stages' peaks."""
    known = profile(7, seed, frozen=seed % 5)
    asked = known, 2 + seed % 2, 3, schedule
    problem, mesh, _ = ask(*asked)
    plans = [
        evaluate(problem, Choice(mesh, Partition(counts)))
        for counts in every(7, len(Replica(problem, mesh).stage_ranks))
    ]
    replayed(made(*asked, memory_limit=min(map(bound_of, plans))))
    if not SCHEDULES[schedule].from_costs:  # those may be made to keep still less
        with pytest.raises(InputError):
            made(*asked, memory_limit=min(max(plan.memory) for plan in plans) - 1)


@pytest.mark.parametrize("seed", mostly_matrix(range(40), everyday=(1, 4)))
def test_automatic_schedule_fits_if_one_microbatch_fits(seed: int) -> None:
    rng, known = random.Random(seed), profile(8, seed, frozen=seed % 4)
    size = rng.randint(1, 4), rng.randint(1, 9)
    layers = Replica(*ask(known, *size, "zb-auto")[:2]).layers

    def need(counts: tuple[int, ...]) -> int:
        stages = pipeline_costs(layers, Partition(counts))
        caps, first = [stage.held for stage in stages.stages], frozen_stages(stages)
        schedule = make("zb-auto", *size, costs=stages, caps=caps, first_trainable=first)
        return bound(layers, counts, schedule)

    limit = min(map(need, every(8, size[0])))
    replayed(made(known, *size, "zb-auto", memory_limit=limit))


def test_moves_are_between_ranks() -> None:
    known = replace(profile(6), partition=(4, 2), ranks=2)
    plan = made(known, 2, 4, "1f1b", balancer="uniform")
    assert plan.partition.counts == (3, 3)
    assert [tuple(move) for move in plan.moves] == [(3, 0, 1)]
    assert plan.moved_bytes == 1200, (
        "a layer's weights and the optimizer's state; its gradients are gone between steps"
    )
    # Another number of stages than the file's: from the even placement, where nothing has to move.
    assert made(known, 3, 4, "1f1b", balancer="uniform").moves == ()


def test_costs_without_sizes_bound_the_microbatches_in_flight() -> None:
    """The schedule keeps at most twice as many microbatches in flight as 1F1B."""
    known = Profile(tuple(LayerCost(1, 1, 1) for _ in range(8)), tuple("abcdefgh"))
    plan = made(known, 4, 40, "zb-auto")
    assert max(pair[0] for pairs in resident(plan.schedule) for pair in pairs) <= 8
    assert plan.memory == (0, 0, 0, 0)
    with pytest.raises(PartitionError, match="no sizes"):
        made(known, 4, 40, memory_limit=100)


@pytest.mark.parametrize(
    ("schedule", "percents"),
    mostly_matrix(
        product(("1f1b", "zb-h1", "zb-auto", "zb-v"), ((98, 95), tuple(range(100, 75, -2)))),
        everyday=[("1f1b", (98, 95)), ("zb-auto", (98, 95))],
    ),
)
def test_a_plan_counts_the_memory_of_a_run(schedule: str, percents: Sequence[int]) -> None:
    """Workspaces and pending messages are half as large as the activations here."""
    known = profile(12)
    sizes = {"workspace_bytes": 60, "forward_workspace_bytes": 60, "weight_workspace_bytes": 30}
    layers = tuple(replace(x, output_bytes=40, **sizes) for x in known.layers)
    asked = replace(known, layers=layers), 3, 6, schedule
    roomy = max(made(*asked).memory)
    fitting = 0
    for percent in percents:
        limit = roomy * percent // 100
        for recompute in ("none", "auto"):
            try:
                plan = made(*asked, memory_limit=limit, recompute=recompute)
            except InputError:
                continue
            counted = with_recompute(plan.replica.layers, plan.recomputed)
            most = max(rank_memory(counted, plan.partition.counts, plan.schedule))
            assert most == max(plan.memory) <= limit
            fitting += 1
    assert fitting >= min(4, len(percents)), "the limits are too tight to show anything"


def test_recompute_all_is_planned_at_the_least_memory() -> None:
    """Balancers reserve the activations of the largest layer on every rank."""
    rng, hits = random.Random(5), 0
    for _ in range(8):
        layers = tuple(
            LayerCost(1, 1, 1, 0, 10, 10, 20, rng.randint(10, 400), 5, rng.randint(1, 9))
            for _ in range(7)
        )
        asked = Profile(layers, tuple(map(str, range(7)))), 3, 4, "1f1b"
        problem, mesh, _ = ask(*asked)
        least = min(
            max(evaluate(problem, Choice(mesh, Partition(counts), frozenset(range(7)))).memory)
            for counts in every(7, 3)
        )
        try:
            hits += max(made(*asked, memory_limit=least, recompute="all").memory) == least
        except InputError:
            continue
    assert hits >= 6, "one boundary at a time is no search through all"


# -- schedules within the whole memory of a rank: also pending messages and workspaces -------------

MIB = 1 << 20
LAYER = LayerCost(1.0, 1.0, 1.0, 0, *(MIB * x for x in (1, 1, 2, 4, 2, 1, 3)))


def known(layers: Sequence[LayerCost]) -> Profile:
    return Profile(tuple(layers), tuple(map(str, range(len(layers)))))


def schedule_within(
    limit: int | None,
    layers: Sequence[LayerCost],
    partition: Partition,
    microbatches: int,
    name: str = "zb-auto",
) -> Schedule:
    ranks = partition.stages // (2 if name == "zb-v" else 1)
    problem, mesh, _ = ask(known(layers), ranks, microbatches, name, memory_limit=limit)
    return evaluate(problem, Choice(mesh, partition)).schedule


@pytest.mark.parametrize("spare", [1.0, 1.1, 1.5, 2.0])
def test_schedule_fits_and_is_faster_if_1f1b_fits(spare: float) -> None:
    """There are 32 microbatches, so that many messages may be pending."""
    layers, partition = [LAYER] * 8, uniform(8, 4)
    limit = int(spare * max(rank_memory(layers, partition.counts, make("1f1b", 4, 32))))
    schedule = schedule_within(limit, layers, partition, 32)
    assert max(rank_memory(layers, partition.counts, schedule)) <= limit
    costs = pipeline_costs(layers, partition)
    assert simulate(schedule, costs).span < simulate(make("1f1b", 4, 32), costs).span, (
        "and it is the better for it"
    )


def test_unlimited_schedule_needs_at_most_twice_1f1b_memory() -> None:
    layers, partition = [LAYER] * 8, uniform(8, 4)
    alive = max(rank_memory(layers, partition.counts, schedule_within(None, layers, partition, 32)))
    assert alive < 2 * max(rank_memory(layers, partition.counts, make("1f1b", 4, 32)))


sizes = st.integers(0, 8 * MIB)


@st.composite
def uneven(draw: st.DrawFn) -> LayerCost:
    f, b, w = (draw(st.floats(0.1, 3.0)) for _ in range(3))
    stash, activation = sorted((draw(sizes), draw(sizes)))
    weight, output, workspace = draw(sizes), draw(sizes), draw(sizes)
    held = (weight, weight, 2 * weight, activation, stash, output, workspace)
    return LayerCost(f, b, w, 0, *held)


@given(
    st.lists(uneven(), min_size=8, max_size=8),
    st.integers(1, 12),
    st.sampled_from(["zb-auto", "zb-v"]),
    st.floats(0.0, 2.0),
)
def test_schedule_within_any_feasible_limit_exists(
    layers: list[LayerCost], microbatches: int, name: str, share: float
) -> None:
    """From the need of the tightest schedule to twice that of 1F1B."""
    partition, ranks = uniform(8, 4), 2 if name == "zb-v" else 4
    costs, placement = pipeline_costs(layers, partition), stage_ranks_of(name, ranks)
    one = [0.0] * ranks
    for stage, rank in zip(costs.stages, placement, strict=True):
        one[rank] += stage.held
    need = partial(rank_memory, layers, partition.counts)
    least = max(need(make(name, ranks, microbatches, costs=costs, caps=one)))
    usual = least if name == "zb-v" else max(need(make("1f1b", ranks, microbatches)))
    limit = int(least + share * max(0, usual - least))
    assert max(need(schedule_within(limit, layers, partition, microbatches, name))) <= limit
