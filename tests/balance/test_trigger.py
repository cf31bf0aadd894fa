"""A move must repay itself."""

import math

import pytest

from dynmo.balance.trigger import worth_moving
from dynmo.errors import PartitionError


def test_it_moves_when_the_saving_exceeds_the_price():
    found = worth_moving(1.25, 1.0, 100, 10.0, margin=2.0, hysteresis=0.05)
    assert found.move
    assert found.predicted_gain == pytest.approx(0.2)
    assert found.reason == "move: a step takes 1.25 s and would take 1 s, 25 s saved over 100 steps against 10 s for the move x 2"


def test_the_price_itself_is_not_enough():
    # 0.25 s over 80 steps is exactly 10 s x 2.
    assert not worth_moving(1.25, 1.0, 80, 10.0, margin=2.0).move
    assert worth_moving(1.25, 1.0, 81, 10.0, margin=2.0).move
    found = worth_moving(1.25, 1.0, 80, 10.0, margin=2.0)
    assert found.reason.startswith("stay: ")
    assert "20 s saved over 80 steps" in found.reason


def test_a_small_gain_stays_however_long_the_horizon():
    found = worth_moving(1.0, 0.875, 10**9, 0.001, hysteresis=0.25)
    assert not found.move
    assert found.reason == "stay: a step takes 1 s and would take 0.875 s, a gain of 12.50% under the 25.00% that counts"
    assert worth_moving(1.0, 0.75, 10**9, 0.001, hysteresis=0.25).move


def test_no_gain_no_move():
    assert not worth_moving(1.0, 1.0, 100, 0.0, hysteresis=0.0).move
    worse = worth_moving(1.0, 1.5, 100, 0.0)
    assert not worse.move
    assert worse.predicted_gain == pytest.approx(-0.5)
    assert "no gain" in worse.reason
    assert not worth_moving(1.0, 0.5, 0, 0.0).move  # no steps left
    assert worth_moving(0.0, 0.0, 5, 1.0).predicted_gain == 0.0


@pytest.mark.parametrize("position", range(6))
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_numbers_that_are_none(position: int, value: float):
    arguments = [1.0, 0.5, 10, 1.0, 1.5, 0.02]
    arguments[position] = value
    with pytest.raises(PartitionError, match="at least 0"):
        worth_moving(*arguments)  # pyright: ignore[reportArgumentType]
