"""The fewest ranks that are fast enough, and when a change repays its pause."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynmo.cost.layer_cost import Forecast, LayerCost, LinkCost
from dynmo.errors import InputError
from dynmo.plan.best import search
from dynmo.plan.decide import Decision, DecisionRecord
from dynmo.plan.options import Balance, Elastic
from dynmo.plan.partition import Partition, uniform
from dynmo.plan.problem import Allowed, Mesh
from tests.plan.questions import question

REPLICAS = (1, 2, 4, 8)
ONES = (1.0,) * 8
MERGING = "python:benchmarks.baselines.merging:"


def ask(
    weights: tuple[float, ...], ranks: int, limit: float, most: int = 8, **given: Any
) -> DecisionRecord:
    """`ranks` in one pipeline, the layers evenly spread. There are `most` ranks."""
    elastic = {"repack": "target_ranks" not in given, "tolerance": 0.0}
    elastic |= {key: given.pop(key) for key in Elastic.model_fields.keys() & given.keys()}
    balance = {"margin": 1.5, "hysteresis": given.pop("hysteresis", 0.02)}
    layers = tuple(LayerCost(x, x, x, 1, 10, 10, 20) for x in weights)
    base = {
        "kind": "ranks",
        "step": 0,
        "available_ranks": most,
        "most_ranks": most,
        "replicas": REPLICAS,
    }
    base |= {"elastic": Elastic(**elastic), "balance": Balance(**balance), "reference": limit}
    base |= {"links": (((0, 1), LinkCost(0.0, 100.0)),), "bandwidth": 100.0}
    base |= {"accumulation_groups": None, "seconds_per_byte": 0.0, "objective": "span"}
    partition = given.pop("partition", uniform(len(weights), ranks))
    return question(layers, Mesh(ranks, 1, 8, 1, "zb-h1"), partition, **base | given)


def best(asked: DecisionRecord, ranks: int) -> float | None:
    """The seconds of the best choice, by a search of its own."""
    try:
        allowed = Allowed(ranks, 8, (1,), ("zb-h1",), REPLICAS)
        return search(asked.problem, allowed).plans[0].seconds
    except InputError:
        return None


def seconds_on(ranks: int, weights: tuple[float, ...] = ONES) -> float:
    seconds = best(ask(weights, 1, 0.0), ranks)
    assert seconds is not None
    return seconds


def goes_to(asked: DecisionRecord) -> int:
    """The number of ranks with which the run goes on."""
    decision = asked.again()
    return decision.plan.mesh.gpus if decision.verdict.pays else asked.now.mesh.gpus


@st.composite
def questions(draw: st.DrawFn) -> DecisionRecord:
    rng = random.Random(draw(st.integers(0, 10**6)))
    ranks = draw(st.integers(1, 8))
    return ask(
        tuple(rng.uniform(0.2, 2.0) for _ in range(8)),
        ranks,
        draw(st.floats(5.0, 200.0)),
        most=draw(st.integers(ranks, 8)),
        min_ranks=draw(st.integers(1, 8)),
        memory_limit=draw(st.sampled_from((None, 120, 200))),
        hysteresis=draw(st.sampled_from((0.0, 0.02, 0.2))),
        pause=draw(st.sampled_from((0.0, 10.0))),
    )


@settings(max_examples=settings().max_examples // 3)
@given(questions())
def test_choice_equals_a_search_of_all_rank_counts(asked: DecisionRecord):
    ranks, limit = asked.now.mesh.gpus, asked.readings.reference
    assert limit is not None
    rules, decision = asked.rules, asked.again()
    least, most = min(rules.elastic.min_ranks, ranks), rules.most_ranks
    assert asked.again() == decision
    assert decision.reference == limit
    mesh, verdict = decision.plan.mesh, decision.verdict
    assert mesh.global_batch == 8
    assert mesh.replicas in REPLICAS
    if not verdict.pays:
        assert decision.plan.choice == asked.now
        assert decision.ranks == ranks
        return
    assert least <= mesh.gpus <= most
    assert decision.ranks == mesh.gpus
    others = {n: s for n in range(least, most + 1) if n != ranks and (s := best(asked, n))}
    # The search must not miss anything that it rules out by a bound or a quick look.
    seconds = decision.plan.seconds
    assert seconds == pytest.approx(others[mesh.gpus])
    if mesh.gpus < ranks:
        within = limit / (1 + rules.balance.hysteresis)
        assert seconds <= within
        fast = [n for n in others if n < ranks and others[n] <= within]
        assert asked.readings.pause or mesh.gpus == min(fast)
    elif seconds > limit:
        assert seconds == min(others[n] for n in others if n > ranks)
    else:
        assert all(others[n] > limit for n in others if ranks < n < mesh.gpus)


def test_fewest_fast_enough_ranks_are_chosen() -> None:
    """Nine equal layers: nine on one rank, or three on each of three ranks."""
    weights = (1.0,) * 9
    three = seconds_on(3, weights)
    decision = ask(weights, 8, three * 1.03).again()
    assert decision.verdict.pays
    assert (decision.plan.mesh.gpus, decision.plan.seconds) == (3, three)
    assert decision.verdict.gain < 0
    reason = decision.verdict.reason
    assert reason.startswith("3 of 8 ranks take ")
    assert "GPU-seconds saved over 100 steps against 0 GPU-seconds" in reason
    assert "\n" not in reason


def test_hysteresis_prevents_oscillation() -> None:
    four = seconds_on(4)
    assert goes_to(ask(ONES, 8, four * 1.1, hysteresis=0.2, min_ranks=4)) > 4
    assert goes_to(ask(ONES, 8, four * 1.21, hysteresis=0.2, min_ranks=4)) == 4
    near, slow = (ask(ONES, 4, four / x, hysteresis=0.2) for x in (1.1, 1.3))
    assert not near.again().verdict.pays
    assert goes_to(slow) > 4


@settings(max_examples=8)
@given(st.integers(0, 10**6), st.integers(1, 8), st.floats(10.0, 100.0), st.floats(0.95, 1.05))
def test_noise_does_not_reverse_a_change(seed: int, ranks: int, limit: float, noise: float) -> None:
    rng = random.Random(seed)
    weights = tuple(rng.uniform(0.2, 2.0) for _ in range(8))
    first = ask(weights, ranks, limit, hysteresis=0.06)
    noisy = ask(tuple(x * noise for x in weights), ranks, limit, hysteresis=0.06)
    decision = first.again()
    then = replace(noisy, now=decision.plan.choice if decision.verdict.pays else first.now)
    was, now, later = ranks, goes_to(first), goes_to(then)
    if now > was and later < was:
        # Fewer ranks are faster than `was` here, but too near to the limit for a first change.
        assert seconds_on(later, weights) < seconds_on(was, weights)
    else:
        assert (now - was) * (later - now) >= 0, "not back"


def test_run_grows_to_the_fastest_ranks_if_all_are_too_slow() -> None:
    """The run does not shrink."""
    grown = ask(ONES, 2, 0.1).again()
    fastest = min((s, n) for n in range(1, 9) if (s := best(ask(ONES, 1, 0.0), n)))
    assert (grown.plan.seconds, grown.plan.mesh.gpus) == fastest
    assert "instead of 2 ranks" in grown.verdict.reason
    stay = ask(ONES, 2, 0.1, most=2).again()
    assert not stay.verdict.pays
    assert "no allowed number of ranks" in stay.verdict.reason
    # Ranks that are not there are wished for. The run takes those that are.
    wish = ask(ONES, 2, 0.1, available_ranks=3).again()
    assert (wish.ranks, wish.plan.mesh.gpus) == (fastest[1], 3)


def test_newcomers_are_taken_if_they_make_the_run_faster() -> None:
    plain = {"repack": False, "most": 8}
    assert goes_to(ask(ONES, 2, 9e9, available_ranks=4, **plain)) == 4
    assert goes_to(ask(ONES, 2, 9e9, available_ranks=2, **plain)) == 2


def test_growth_compares_with_the_best_current_placement() -> None:
    uneven = ask(ONES, 4, seconds_on(4) * 1.01, partition=Partition((5, 1, 1, 1)))
    assert not uneven.again().verdict.pays
    assert uneven.again().plan.seconds > 1.2 * seconds_on(4)


def test_reference_is_the_best_step_of_the_ranks_now() -> None:
    first = ask(ONES, 4, 0.0, reference=None, partition=Partition((5, 1, 1, 1)))
    assert first.again().reference == pytest.approx(seconds_on(4))


def test_a_change_must_repay_its_pauses() -> None:
    free = ask(ONES, 8, 1000.0).again()
    assert free.plan.mesh.gpus == 1
    freed = 7 * free.plan.seconds * 100
    # All eight ranks wait, and the margin is 1.5.
    cheap, dear = (ask(ONES, 8, 1000.0, pause=freed * x / 12) for x in (0.99, 1.01))
    assert goes_to(cheap) == 1
    assert goes_to(dear) == 8
    assert "GPU-seconds saved over 100 steps against" in dear.again().verdict.reason
    # The rank that stays must get seven layers of 30 bytes.
    priced = ask(ONES, 8, 1000.0, seconds_per_byte=0.01).again()
    assert priced.verdict.price == pytest.approx(8 * 2.1)
    assert goes_to(ask(ONES, 8, 1000.0, seconds_per_byte=freed / 12 / 210 * 1.01)) != 1


def turning(asked: DecisionRecord, step: int, factor: float) -> DecisionRecord:
    """All layers take `factor` times as long from a step on."""
    later = Forecast(step, tuple(range(8)), factor, factor, factor)
    return replace(asked, problem=replace(asked.problem, forecasts=((later,),)))


def test_gain_of_a_shrink_ends_at_the_forecast_change() -> None:
    two = seconds_on(2)
    asked = ask(ONES, 8, two * 1.1, min_ranks=2, pause=two)
    assert goes_to(asked) == 2
    # Then the layers take twice as long again. Six ranks are free for so many steps, and all eight
    # wait twice, times the margin.
    short, long = (turning(asked, n, 2.0) for n in (3, 20))
    assert goes_to(long) == 2
    assert "until the change" not in asked.again().verdict.reason
    assert goes_to(short) != 2
    free = ask(ONES, 8, two * 1.1, min_ranks=2)
    assert goes_to(turning(free, 6, 2.0)) == 2
    waits = turning(free, 3, 4.0)
    assert goes_to(waits) == 8
    assert waits.again().verdict.reason.startswith("wait: ")
    assert goes_to(turning(asked, 50, 0.5)) == 2


def test_gain_of_a_growth_ends_at_the_forecast_change() -> None:
    two, four = seconds_on(2), seconds_on(4)
    asked = ask(ONES, 2, four * 1.01, most=4, pause=(two - four) * 2)
    assert goes_to(asked) == 4
    assert goes_to(turning(asked, 5, 0.25)) == 2
    assert goes_to(turning(asked, 20, 0.25)) == 4


def test_target_ranks_are_chosen_as_soon_as_they_fit() -> None:
    decision = ask(ONES, 8, 0.1, target_ranks=2, pause=1e9, memory_limit=400, halves=()).again()
    assert (decision.plan.mesh.gpus, decision.ranks) == (2, 2)
    assert decision.verdict.reason.startswith("the target is 2 ranks; 2 of 8 ranks take ")
    refused = ask(ONES, 8, 0.1, target_ranks=1, memory_limit=100).again()
    assert not refused.verdict.pays
    assert refused.refusal is not None
    assert refused.refusal.startswith("1 rank cannot hold the model: ")
    assert "over the limit of 100" in refused.refusal
    assert "\n" not in refused.refusal
    assert not ask(ONES, 8, 0.1, target_ranks=8).again().verdict.pays
    outside = ask(ONES, 2, 0.1, most=3, target_ranks=4).again()
    assert (outside.ranks, outside.verdict.pays) == (4, False)
    assert outside.verdict.reason == "stay: the target is 4 ranks, and 1 to 3 ranks are allowed"


def test_fewest_allowed_ranks_are_kept() -> None:
    assert goes_to(ask(ONES, 8, 1e9, min_ranks=3)) == 3
    assert goes_to(ask(ONES, 2, 1e9, min_ranks=3)) == 2, "it did not start with as many"


def test_kept_ranks_with_their_layers_move_fewer_bytes() -> None:
    """Ranks 0 and 3 stay. Rank 3 already holds the last two layers."""
    known = {"min_ranks": 2, "replicas": (1,), "seconds_per_byte": 0.01}
    asked = ask(ONES, 4, 1000.0, **known)
    other = ask(ONES, 4, 1000.0, machines=("a", "b", "b", "a"), **known)
    assert asked.again().verdict.price == pytest.approx(4 * 1.2)
    assert other.again().verdict.price == pytest.approx(4 * 0.6)


def test_uncertain_measurements_keep_the_ranks() -> None:
    def asked(*halves: float, **given: Any) -> Decision:
        own = ask(ONES, 8, 1000.0, **given)
        costs = tuple(tuple(replace(x, f=x.f * by) for x in own.problem.layers) for by in halves)
        return replace(own, readings=replace(own.readings, halves=costs)).again()

    assert asked(1.0, 1.0).verdict.pays
    assert asked(1.0, 1.0, preempted=0.3).verdict.pays, "far below the limit"
    for doubtful in (asked(), asked(1.0, 1e3)):
        assert doubtful.verdict.uncertain
        assert not doubtful.verdict.pays
        assert doubtful.ranks == 8
    tight = asked(1.0, 1.0, preempted=0.3, reference=seconds_on(1) * 1.05)
    assert "other processes" in tight.verdict.reason
    assert asked(target_ranks=1).verdict.pays, "a target needs no readings"
    slow = ask(ONES, 2, 0.1)
    assert slow.again().verdict.pays
    alone = replace(slow, readings=replace(slow.readings, halves=()))
    assert "rests on one reading" in alone.again().verdict.reason


def test_sizes_and_replicas_fit_the_accumulation_groups() -> None:
    mesh = Mesh(2, 4, 2, 4, "1f1b")
    assert mesh.fewer_replicas(4) == (1, 2, 4)
    assert mesh.fewer_replicas(2) == (1, 2)
    assert mesh.near_sizes(4, (1, 2, 4)) == (1, 2, 4, 8)
    retuned = ask(ONES, 8, 1000.0, sizes=(1, 2), retune=True).again()
    assert retuned.plan.mesh.micro_batch in (1, 2)


# -- merging by memory -----------------------------------------------------------------------------


def test_a_rule_by_memory_decides_in_place_of_the_speed() -> None:
    asked = ask(ONES, 4, 0.1, most=4, algorithm="first-fit", memory_limit=200, halves=())
    decision = asked.again()
    assert decision.verdict.pays
    assert (decision.plan.partition.counts, decision.ranks) == ((4, 4), 2)
    assert decision.verdict.reason == "first-fit: 2 of 4 ranks by memory"
    tight = replace(asked, problem=replace(asked.problem, memory_limit=90))
    assert not tight.again().verdict.pays


# -- a slow rank -----------------------------------------------------------------------------------


def with_slow(speed: float, **given: Any) -> DecisionRecord:
    """One of 4 ranks is slow. A step may take as long as on 4 equal ranks."""
    speeds = (1.0, 1.0, speed, 1.0)
    given = {"partition": Partition((7, 6, 4, 7)), "rank_speeds": speeds} | given
    weights = (1.0,) * 24
    return ask(weights, 4, seconds_on(4, weights), most=4, **given)


def test_slow_rank_is_given_back_if_the_others_are_as_fast_without_it() -> None:
    asked = with_slow(0.25)
    decision = asked.again()
    assert (goes_to(asked), decision.ranks) == (3, 3)
    assert decision.plan.seconds == pytest.approx(seconds_on(3, (1.0,) * 24))
    assert "with slow ranks" in decision.verdict.reason
    assert decision.reference == asked.readings.reference
    assert decision.verdict.gain > 0, "the slow rank held up the others"


def test_slow_rank_that_helps_stays() -> None:
    """At half speed it is worth half a rank."""
    assert goes_to(with_slow(0.5)) == 4


def test_slow_rank_stays_if_no_change_of_ranks_is_allowed() -> None:
    assert goes_to(with_slow(0.25, repack=False)) == 4
    assert goes_to(with_slow(0.25, min_ranks=4)) == 4
    assert goes_to(with_slow(0.25, pause=1e6)) == 4


def test_slow_rank_that_was_given_back_is_not_asked_for() -> None:
    asked = ask((1.0,) * 24, 3, seconds_on(4, (1.0,) * 24), most=3)
    assert (goes_to(asked), asked.again().ranks) == (3, 3)
    assert goes_to(replace(asked, rules=replace(asked.rules, available_ranks=4))) == 4


def test_fewer_replicas_without_a_slow_one() -> None:
    speeds = (1.0, 1.0, 0.2, 1.0)
    asked = ask((1.0,) * 8, 2, 0.0, most=4)
    mesh = replace(asked.now.mesh, replicas=2, microbatches=4)
    readings = replace(asked.readings, rank_speeds=speeds, reference=1.0)
    asked = replace(asked, now=replace(asked.now, mesh=mesh), readings=readings)
    assert goes_to(asked) < 4
