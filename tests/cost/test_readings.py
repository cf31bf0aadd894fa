"""Medians of measurements, and two halves of them that share no reading."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynmo.cost.readings import WINDOW, Readings, Times, scale_to


def layer(*steps: tuple[list[float], list[float], list[float]]) -> Readings:
    readings = Readings()
    for step in steps:
        readings.add(*step)
    return readings


def test_new_readings_are_empty() -> None:
    readings = Readings()
    assert readings.seconds == (0.0, 0.0, 0.0)
    assert readings.halves is None


def test_one_step_is_halved_by_microbatches() -> None:
    readings = layer(([1.0, 2.0, 8.0, 9.0, 9.0], [4.0, 6.0], []))
    assert readings.seconds == (8.0, 5.0, 0.0)
    assert readings.halves == (Times(1.5, 4.0, 0.0), Times(9.0, 6.0, 0.0)), (
        "the one in the middle is in neither"
    )


@pytest.mark.parametrize(
    "step", [([1.0], [1.0], [1.0]), ([1.0, 1.0], [1.0, 1.0], [1.0]), ([1.0], [], [])]
)
def test_one_reading_has_no_halves(step: tuple[list[float], list[float], list[float]]) -> None:
    assert layer(step).halves is None
    assert layer(step, step).halves is not None, "two steps are two readings"


def test_steps_are_halved_by_time_and_only_the_newest_count() -> None:
    readings = layer(*(([seconds], [], []) for seconds in (9.0, 1.0, 2.0, 50.0, 3.0, 4.0)))
    assert readings.seconds.f == 3.0
    assert readings.halves == (Times(f=1.5), Times(f=3.5))


SECONDS = st.floats(0.5, 2.0)


@given(st.lists(SECONDS, min_size=2, max_size=20), st.floats(10, 1e6), st.data())
def test_outlier_is_in_at_most_one_half(
    readings: list[float], outlier: float, data: st.DataObject
) -> None:
    """The readings are microbatches of one step or steps of one microbatch."""
    at = data.draw(st.integers(0, len(readings) - 1))
    readings = [*readings[:at], outlier, *readings[at + 1 :]]
    newest = readings[-WINDOW:]
    for filled in (layer((readings, [], [])), layer(*(([x], [], []) for x in readings))):
        halves = filled.halves
        assert halves is None or sum(half.f > 2.0 for half in halves) <= 1
    if len(newest) > 2:
        assert layer(*(([x], [], []) for x in readings)).seconds.f <= 2.0


def test_lasting_change_reaches_both_halves_after_a_window() -> None:
    readings = layer(
        *(([1.0], [], []) for _ in range(WINDOW)), *(([3.0], [], []) for _ in range(WINDOW - 2))
    )
    assert readings.seconds.f == 3.0
    assert readings.halves == (Times(f=1.0), Times(f=3.0))
    for _ in range(2):
        readings.add([3.0], [], [])
    assert readings.halves == (Times(f=3.0), Times(f=3.0))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_alike_readings_may_be_added_at_once(count: int) -> None:
    each, at_once, one_by_one = Times(0.3, 0.7, 0.0), Readings(), Readings()
    for _ in range(3):
        at_once.add_alike(each, count > 1)
        one_by_one.add(*([seconds] * count for seconds in each))
        assert (at_once.seconds, at_once.halves) == (one_by_one.seconds, one_by_one.halves)


def test_readings_are_scaled_to_the_whole() -> None:
    one, two = Readings(), Readings()
    for times in (1.0, 3.0):
        one.add([times], [0.0], [2.0])
        two.add([times], [4.0], [0.0])
    scale_to([one, two], Times(8.0, 2.0, 1.0))
    assert (one.seconds, two.seconds) == (Times(4.0, 0.0, 1.0), Times(4.0, 2.0, 0.0))
    assert one.halves == (Times(2.0, 0.0, 1.0), Times(6.0, 0.0, 1.0))
    scale_to([one, two], Times(4.0, 0.0, 2.0))
    assert (one.seconds, two.seconds) == (Times(2.0, 0.0, 2.0), Times(2.0, 4.0, 0.0))
    one.condense()
    assert one.seconds == Times(2.0, 0.0, 2.0), "what is known counts as one step"
    one.add([6.0], [0.0], [2.0])
    assert one.seconds == Times(4.0, 0.0, 2.0)
    assert one.halves == (Times(2.0, 0.0, 2.0), Times(6.0, 0.0, 2.0))
