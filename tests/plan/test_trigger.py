"""The decision whether a move repays its price."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynmo.cost.layer_cost import Forecast, LayerCost
from dynmo.errors import PartitionError
from dynmo.options import LARGEST
from dynmo.plan.trigger import (
    Decision,
    Outlook,
    RebalanceWatch,
    confirmed,
    forecast_intervals,
    worth_moving,
    worth_moving_through,
)


def test_layers_move_if_the_saving_exceeds_the_price():
    decision = worth_moving(1.25, 1.0, 100, 10.0, margin=2.0, hysteresis=0.05)
    assert decision.move
    assert decision.predicted_gain == pytest.approx(0.2)
    assert decision.reason == (
        "move: a step takes 1.25 s and would take 1 s, 25 s saved over 100 steps against 10 "
        "s for the move x 2"
    )
    # 0.25 s over 80 steps is exactly 10 s x 2.
    assert not worth_moving(1.25, 1.0, 80, 10.0, margin=2.0).move
    assert worth_moving(1.25, 1.0, 81, 10.0, margin=2.0).move
    decision = worth_moving(1.25, 1.0, 80, 10.0, margin=2.0)
    assert decision.reason.startswith("stay: ")
    assert "20 s saved over 80 steps" in decision.reason


def test_a_run_without_an_end_counts_no_steps():
    reason = worth_moving(1.25, 1.0, LARGEST - 4, 10.0).reason
    assert "0.25 s saved in each step from now on against 10 s" in reason


def test_gain_below_the_hysteresis_never_moves():
    decision = worth_moving(1.0, 0.875, 10**9, 0.001, hysteresis=0.25)
    assert not decision.move
    assert decision.reason.startswith("stay: ")
    assert "12.50% under the 25.00%" in decision.reason
    assert worth_moving(1.0, 0.75, 10**9, 0.001, hysteresis=0.25).move


def test_move_needs_a_gain():
    assert not worth_moving(1.0, 1.0, 100, 0.0, hysteresis=0.0).move
    worse = worth_moving(1.0, 1.5, 100, 0.0)
    assert not worse.move
    assert worse.predicted_gain == pytest.approx(-0.5)
    assert "no gain" in worse.reason
    assert not worth_moving(1.0, 0.5, 0, 0.0).move  # no steps left
    assert worth_moving(0.0, 0.0, 5, 1.0).predicted_gain == 0.0


@pytest.mark.parametrize("position", range(6))
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_invalid_numbers_are_refused(position: int, value: float):
    arguments = [1.0, 0.5, 10, 1.0, 1.5, 0.02]
    arguments[position] = value
    with pytest.raises(PartitionError, match="at least 0"):
        worth_moving(*arguments)  # pyright: ignore[reportArgumentType]


# -- what is known of the future -------------------------------------------------------------------


def test_forecasts_split_the_remaining_steps():
    layers = (LayerCost(1, 2, 4, activation_bytes=10, stash_bytes=4),) * 3
    pruning = [
        Forecast(5, (0, 1), 0.5, 0.5, 0.5),
        Forecast(8, (0, 1), 0.25, 0.25, 0.25),
        Forecast(99, (0,), 0.0),
    ]
    freezing = [Forecast(8, (0,), b=0.0, w=0.0), Forecast(2, (2,), w=0.0)]
    intervals = forecast_intervals(layers, [pruning, freezing], 3, 20)
    assert [(x.start, x.stop) for x in intervals] == [(3, 5), (5, 8), (8, 20)]
    assert [[(x.f, x.b, x.w) for x in phase.layers] for phase in intervals] == [
        [(1, 2, 4), (1, 2, 4), (1, 2, 0)],
        [(0.5, 1, 2), (0.5, 1, 2), (1, 2, 0)],
        [(0.25, 0, 0), (0.25, 0.5, 1), (1, 2, 0)],
    ], "of one case the latest holds, of several the product"
    held = [(x.activation_bytes, x.stash_bytes) for x in intervals[2].layers]
    assert held == [(0, 0), (10, 4), (10, 0)]
    assert forecast_intervals(layers, [], 3, 20) == forecast_intervals(layers, [[]], 3, 20)
    assert forecast_intervals(layers, [], 3, 20)[0].layers == layers
    assert forecast_intervals(layers, [], 20, 20) == ()


def test_gain_counts_only_until_the_forecast_reverses_it():
    better, worse, even = (1.2, 1.0), (1.0, 1.1), (1.0, 1.0)
    whole = worth_moving_through([Outlook(0, 100, *better)], 10.0, 1.5)
    assert whole == worth_moving(1.2, 1.0, 100, 10.0, 1.5)
    assert whole.move
    cut = worth_moving_through([Outlook(0, 50, *better), Outlook(50, 100, *worse)], 10.0, 1.5)
    assert not cut.move, "10 s saved until step 50 do not pay for two moves"
    assert cut.reason.endswith(
        "10 s saved over 50 steps against 20 s for the move x 1.5, until the change expected at "
        "step 50, and then back"
    )
    assert worth_moving_through([Outlook(0, 50, *better), Outlook(50, 100, *even)], 3.0, 1.5).move
    both = worth_moving_through([Outlook(0, 50, *better), Outlook(50, 100, 1.0, 0.9)], 9.0, 1.5)
    assert both.move, "10 and 5 s"
    assert "15 s saved over 100 steps against 9 s" in both.reason
    assert both.predicted_gain == pytest.approx(1 - 1 / 1.2), "of the steps that come first"
    later = worth_moving_through([Outlook(0, 50, *worse), Outlook(50, 100, *better)], 0.0)
    assert not later.move, "later is another decision"


def test_short_lived_gain_waits():
    outlook = [Outlook(8, 10, 2.0, 1.0), Outlook(10, 100, 1.0, 2.0)]
    decision = worth_moving_through(outlook, 0.0)
    assert not decision.move
    assert decision.reason.startswith("wait: a gain of 50.00% would last 2 steps; from step 10 on")
    assert worth_moving_through([Outlook(8, 13, 2.0, 1.0), Outlook(13, 100, 1.0, 2.0)], 0.0).move
    assert not worth_moving_through([], 0.0).move


SECONDS = st.floats(0.1, 10)


@given(
    st.lists(st.tuples(st.integers(1, 50), SECONDS, SECONDS), min_size=1, max_size=5),
    st.floats(0, 100),
    st.floats(0, 0.3),
)
def test_a_move_is_never_made_at_a_loss(
    parts: list[tuple[int, float, float]], price: float, hysteresis: float
):
    outlook: list[Outlook] = []
    for steps, now, then in parts:
        start = outlook[-1].stop if outlook else 3
        outlook.append(Outlook(start, start + steps, now, then))
    decision = worth_moving_through(outlook, price, 1.0, hysteresis)
    good = next((i for i, x in enumerate(outlook) if x.then >= x.now), len(outlook))
    saved = math.fsum((x.now - x.then) * (x.stop - x.start) for x in outlook[:good])
    if decision.move:
        assert saved > price * (1 if good == len(outlook) else 2) * (1 - 1e-9)
        assert outlook[0].then < outlook[0].now
    # Cutting a phase in two changes nothing.
    first = outlook[0]
    if first.stop - first.start > 1:
        middle = first.start + 1
        halves = [replace(first, stop=middle), replace(first, start=middle)]
        cut = worth_moving_through([*halves, *outlook[1:]], price, 1.0, hysteresis)
        close = any(math.isclose(saved, times * price, rel_tol=1e-9) for times in (1, 2))
        believed = outlook[:good] or outlook[:1]
        now, then = (
            sum(getattr(x, name) * (x.stop - x.start) for x in believed) for name in ("now", "then")
        )
        close |= math.isclose(1 - then / now, hysteresis, rel_tol=1e-9, abs_tol=1e-12)
        assert close or cut.move == decision.move


# -- what is certain -------------------------------------------------------------------------------


MOVE, STAY = Decision(True, 0.1, "move: it pays"), Decision(False, 0.0, "stay: no gain")


def test_move_needs_all_parts_of_the_readings():
    assert confirmed(MOVE, [MOVE, MOVE]) == MOVE
    decision = confirmed(MOVE, [MOVE, STAY])
    assert (decision.move, decision.predicted_gain, decision.uncertain) == (False, 0.1, True)
    assert "all parts" in decision.reason
    alone = confirmed(MOVE, [])
    assert (alone.move, alone.uncertain) == (False, True)
    assert "one reading" in alone.reason
    assert confirmed(STAY, [MOVE, MOVE]) == STAY, "to stay needs no support"


def test_move_must_exceed_the_noise_of_other_processes():
    assert confirmed(MOVE, [MOVE, MOVE], preempted=0.2) == MOVE
    decision = confirmed(MOVE, [MOVE, MOVE], preempted=0.5)
    assert (decision.move, decision.uncertain) == (False, True)
    assert "other processes take 50%" in decision.reason


# -- every = "auto" --------------------------------------------------------------------------------


EVEN, UNEVEN = (1.0, 1.0), (1.0, 1.5)


def seen(watch: RebalanceWatch, *steps: tuple[float, ...]) -> list[bool]:
    out: list[bool] = []
    for busy in steps:
        watch.observe(busy)
        out.append(watch.is_due)
    return out


@pytest.fixture
def watch() -> RebalanceWatch:
    """A watch whose first look is over. It comes after some even steps."""
    watch = RebalanceWatch(0.02)
    assert seen(watch, *[EVEN] * 5) == [False] * 4 + [True]
    watch.decided()
    return watch


def test_rebalance_watch_ignores_noise_and_even_growth(watch: RebalanceWatch):
    assert not any(seen(watch, *[(2.0, 2.02)] * 20)), "all ranks alike may work more"
    assert not any(seen(watch, (1.0, 9.0), (2.0, 2.0), (9.0, 1.0))), "single steps are noise"
    assert any(seen(watch, *[UNEVEN] * 3)), "drift"
    watch.decided()
    assert not any(seen(watch, *[UNEVEN] * 20)), "it was looked at"
    watch.on_workload_change()
    assert not watch.is_due, "nothing of the new work is measured"
    assert seen(watch, UNEVEN) == [True]
    watch.decided()
    # Once more, should that step have been one by chance.
    assert seen(watch, *[UNEVEN] * 3) == [False, True, True]
    watch.decided()
    # Work that changes before every step is looked at too.
    for expected in (True, False, True):
        watch.on_workload_change()
        assert seen(watch, UNEVEN) == [expected]
        if expected:
            watch.decided()
    assert not watch.is_due
    assert not any(seen(watch, *[(0.0, 0.0)] * 9)), "nothing to do is even"


def test_uncertain_decision_is_checked_later(watch: RebalanceWatch):
    watch.check_later()
    assert seen(watch, *[EVEN] * 5) == [False] * 4 + [True]
    watch.decided()
    assert not any(seen(watch, *[EVEN] * 9))
    watch.on_workload_change()
    assert seen(watch, EVEN) == [True]
    watch.decided()
    watch.check_later()
    assert seen(watch, *[EVEN] * 2) == [False, True], "the second look comes sooner"


def test_a_change_right_after_a_decision_is_looked_at(watch: RebalanceWatch):
    """The reference of the next decisions already has the change in it."""
    assert not any(seen(watch, *[(1.0, 2.0)] * 9))
    assert watch.is_due or seen(watch, (1.0, 2.0)) == [True]
    watch.decided()
    assert not any(seen(watch, *[(1.0, 2.0)] * 20)), "it was looked at"


def test_a_move_changes_the_imbalance_and_asks_for_no_look():
    watch = RebalanceWatch(0.02)
    assert seen(watch, *[(1.0, 3.0)] * 5)[-1]
    watch.decided()
    watch.moved()
    assert not any(seen(watch, *[(1.0, 1.0)] * 20))
