"""Whether a change repays its price."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynmo.cost.costs_file import Profile
from dynmo.cost.layer_cost import Forecast, LayerCost
from dynmo.options import LARGEST
from dynmo.plan.pays import Change, Interval, Verdict, at, confirm, intervals, pays
from dynmo.plan.problem import Layers, Problem, Work

Part = tuple[int, int, float, float]


def worth(
    *parts: Part, price: float = 10.0, margin: float = 1.5, hysteresis: float = 0.02
) -> Verdict:
    """Weighs a change from `start, stop, seconds now, seconds then` of each interval."""
    # Each interval has a cost of its own, by which its seconds are found.
    costs = [(LayerCost(float(i), 0.0, 0.0),) for i in range(len(parts))]
    found = dict[Layers, tuple[float, float]]()
    for layers, part in zip(costs, parts, strict=True):
        found[layers] = part[2], part[3]
    spans = [Interval(part[0], part[1], x) for part, x in zip(parts, costs, strict=True)]
    return pays(Change(price, price, margin, hysteresis), spans, lambda layers: found[layers])


def test_a_change_is_made_if_the_saving_exceeds_the_price():
    verdict = worth((0, 100, 1.25, 1.0), margin=2.0, hysteresis=0.05)
    assert verdict.pays
    assert verdict.gain == pytest.approx(0.2)
    assert verdict.price == 10.0
    assert verdict.reason == (
        "move: a step takes 1.25 s and would take 1 s, 25 s saved over 100 steps against 10 "
        "s for the move x 2"
    )
    # 0.25 s over 80 steps is exactly 10 s x 2.
    assert worth((0, 81, 1.25, 1.0), margin=2.0).pays
    stay = worth((0, 80, 1.25, 1.0), margin=2.0)
    assert not stay.pays
    assert stay.reason.startswith("stay: ")
    assert "20 s saved over 80 steps" in stay.reason


def test_a_run_without_an_end_counts_no_steps():
    reason = worth((0, LARGEST - 4, 1.25, 1.0)).reason
    assert "0.25 s saved in each step from now on against 10 s" in reason


def test_gain_below_the_hysteresis_never_counts():
    little = worth((0, 10**9, 1.0, 0.875), price=0.001, hysteresis=0.25)
    assert not little.pays
    assert little.reason.startswith("stay: ")
    assert "12.50% under the 25.00%" in little.reason
    assert worth((0, 10**9, 1.0, 0.75), price=0.001, hysteresis=0.25).pays


def test_a_change_needs_a_gain():
    assert not worth((0, 100, 1.0, 1.0), price=0.0, hysteresis=0.0).pays
    worse = worth((0, 100, 1.0, 1.5), price=0.0)
    assert not worse.pays
    assert worse.gain == pytest.approx(-0.5)
    assert "no gain" in worse.reason
    assert not worth((0, 0, 1.0, 0.5), price=0.0).pays, "no steps left"
    assert not worth(price=0.0).pays
    assert worth((0, 5, 0.0, 0.0)).gain == 0.0


# -- what is known of the future -------------------------------------------------------------------


def test_forecasts_split_the_remaining_steps():
    layers = (LayerCost(1, 2, 4, activation_bytes=10, stash_bytes=4),) * 3
    pruning = (
        Forecast(5, (0, 1), 0.5, 0.5, 0.5),
        Forecast(8, (0, 1), 0.25, 0.25, 0.25),
        Forecast(99, (0,), 0.0),
    )
    freezing = (Forecast(8, (0,), b=0.0, w=0.0), Forecast(2, (2,), w=0.0))
    problem = Problem(Profile(layers, ("a", "b", "c")), Work(step=3, end=20))
    found = intervals(replace(problem, forecasts=(pruning, freezing)))
    assert [(x.start, x.stop) for x in found] == [(3, 5), (5, 8), (8, 20)]
    assert [[(x.f, x.b, x.w) for x in phase.layers] for phase in found] == [
        [(1, 2, 4), (1, 2, 4), (1, 2, 0)],
        [(0.5, 1, 2), (0.5, 1, 2), (1, 2, 0)],
        [(0.25, 0, 0), (0.25, 0.5, 1), (1, 2, 0)],
    ], "of one case the latest holds, of several the product"
    held = [(x.activation_bytes, x.stash_bytes) for x in found[2].layers]
    assert held == [(0, 0), (10, 4), (10, 0)]
    assert at(problem, found[2].layers).profile.first_trainable == 1
    assert intervals(problem) == intervals(replace(problem, forecasts=((),)))
    assert intervals(problem) == (Interval(3, 20, layers),)
    assert at(problem, layers) is problem
    assert intervals(replace(problem, work=Work(step=20, end=20))) == ()


def test_gain_counts_only_until_the_forecast_reverses_it():
    better, worse, even = (1.2, 1.0), (1.0, 1.1), (1.0, 1.0)
    assert worth((0, 100, *better)).pays
    cut = worth((0, 50, *better), (50, 100, *worse))
    assert not cut.pays, "10 s saved until step 50 do not pay for two moves"
    assert cut.reason.endswith(
        "10 s saved over 50 steps against 20 s for the move x 1.5, until the change expected at "
        "step 50, and then back"
    )
    assert worth((0, 50, *better), (50, 100, *even), price=3.0).pays
    both = worth((0, 50, *better), (50, 100, 1.0, 0.9), price=9.0)
    assert both.pays, "10 and 5 s"
    assert "15 s saved over 100 steps against 9 s" in both.reason
    assert both.gain == pytest.approx(1 - 1 / 1.2), "of the steps that come first"
    assert not worth((0, 50, *worse), (50, 100, *better), price=0.0).pays, "later is another one"


def test_short_lived_gain_waits():
    verdict = worth((8, 10, 2.0, 1.0), (10, 100, 1.0, 2.0), price=0.0)
    assert not verdict.pays
    assert verdict.reason == (
        "wait: a step takes 2 s and would take 1 s; that would pay for 2 steps only, until step 10"
    )
    assert worth((8, 13, 2.0, 1.0), (13, 100, 1.0, 2.0), price=0.0).pays


def test_no_more_is_looked_at_than_repays_both_ways():
    seen = list[int]()

    def seconds(layers: tuple[LayerCost, ...]) -> tuple[float, float] | None:
        seen.append(len(layers))
        return None if len(layers) == 20 else (2.0, 1.0)

    spans = [Interval(10 * i, 10 * i + 10, (LayerCost(1, 1, 1),) * i) for i in range(30)]
    early = pays(Change(10.0, 5.0), spans, seconds)
    assert early.pays
    assert "over at least 30 steps against 10 s" in early.reason
    assert seen == [0, 1, 2]
    dear = pays(Change(41.0, 0.0), spans, seconds)
    assert dear.pays
    dear = pays(Change(54.0, 0.0), spans, seconds)
    assert not dear.pays, "of later intervals than eight nothing is believed"
    assert "until the change expected at step 80" in dear.reason


SECONDS = st.floats(0.1, 10)


@given(
    st.lists(st.tuples(st.integers(1, 50), SECONDS, SECONDS), min_size=1, max_size=5),
    st.floats(0, 100),
    st.floats(0, 0.3),
)
def test_a_change_is_never_made_at_a_loss(
    given: list[tuple[int, float, float]], price: float, hysteresis: float
):
    parts: list[Part] = []
    for steps, now, then in given:
        start = parts[-1][1] if parts else 3
        parts.append((start, start + steps, now, then))
    verdict = worth(*parts, price=price, margin=1.0, hysteresis=hysteresis)
    good = next((i for i, x in enumerate(parts) if x[3] >= x[2]), len(parts))
    saved = math.fsum((now - then) * (stop - start) for start, stop, now, then in parts[:good])
    if verdict.pays:
        assert saved > price * (1 if good == len(parts) else 2) * (1 - 1e-9)
        assert good
    if len(parts) > good and parts[good][0] - 3 < 5:
        assert not verdict.pays


# -- certainty -------------------------------------------------------------------------------------

MOVE, STAY = Verdict(True, 0.1, "move: so"), Verdict(False, 0.0, "stay: so")


def test_a_change_needs_all_parts_of_the_readings():
    assert confirm(MOVE, [True, True]) == MOVE
    verdict = confirm(MOVE, [True, False])
    assert (verdict.pays, verdict.gain, verdict.uncertain) == (False, 0.1, True)
    assert verdict.reason == "stay: a gain of 10.00% is not what all parts of the readings say"
    alone = confirm(MOVE, [])
    assert (alone.pays, alone.uncertain) == (False, True)
    assert "one reading" in alone.reason
    assert confirm(STAY, [True, True]) == STAY, "to stay needs no support"


def test_a_change_must_exceed_the_noise_of_other_processes():
    assert confirm(MOVE, [True, True], 0.2) == MOVE
    verdict = confirm(MOVE, [True, True], 0.5)
    assert (verdict.pays, verdict.uncertain) == (False, True)
    assert "other processes take 50%" in verdict.reason
    far = replace(MOVE, lead=0.9)
    assert confirm(far, [True, True], 0.5) == far
    near = replace(MOVE, gain=0.9, lead=0.1)
    assert "a lead of 10.00%" in confirm(near, [True, True], 0.5).reason
