"""The speeds of ranks, from the times of layers that are alike."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynmo.plan.speeds import NOISE, Sample, SpeedEstimate, estimate_speeds


def samples(
    speeds: Sequence[float],
    layers: int = 6,
    scatter: float = 0.0,
    early: Sequence[float] | None = None,
    seed: int = 0,
) -> list[Sample]:
    """Two kinds of layers on each rank. `early` are the speeds in the first half."""
    chance, before = random.Random(seed), early or speeds

    def seconds(work: float, speed: float) -> float:
        return work / speed * (1 + chance.uniform(-scatter, scatter))

    return [
        Sample(
            rank,
            layer % 2,
            work,
            (seconds(work, speed), seconds(work, before[rank]), seconds(work, speed)),
        )
        for rank, speed in enumerate(speeds)
        for layer in range(layers)
        for work in [(1.0 + layer % 2) * (1 + layer)]
    ]


def always(rank: int, kind: int | str, seconds: float, work: float = 1.0) -> Sample:
    return Sample(rank, kind, work, (seconds, seconds, seconds))


def ones(ranks: int) -> tuple[float, ...]:
    return (1.0,) * ranks


@given(
    st.lists(st.sampled_from([0.25, 0.5, 1.0, 1.0, 1.0, 2.0]), min_size=2, max_size=8),
    st.floats(0, 0.05),
    st.integers(0, 1000),
)
def test_speeds_are_found_relative_to_the_middle_rank(
    speeds: list[float], scatter: float, seed: int
) -> None:
    middle = sorted(speeds)[len(speeds) // 2]
    found = estimate_speeds(samples(speeds, scatter=scatter, seed=seed), ones(len(speeds)))
    assert found.speeds == pytest.approx([x / middle for x in speeds], rel=0.12)


@given(st.integers(2, 8), st.integers(1, 9), st.floats(0, NOISE / 3), st.integers(0, 10_000))
def test_noise_alone_changes_no_speed(ranks: int, layers: int, scatter: float, seed: int) -> None:
    noisy = samples(ones(ranks), layers, scatter, seed=seed)
    assert estimate_speeds(noisy, ones(ranks)).speeds == ones(ranks)


@given(st.integers(0, 10_000), st.floats(0.2, 1))
def test_disturbed_readings_need_a_larger_difference(seed: int, disturbed: float) -> None:
    noisy = samples(ones(4), scatter=NOISE / 3 + disturbed / 8, seed=seed)
    assert estimate_speeds(noisy, ones(4), disturbed).speeds == ones(4)


def test_a_rank_that_was_slow_in_half_of_the_readings_is_not_yet_slow() -> None:
    changing = samples([1, 0.5, 1], early=[1, 1, 1])
    assert estimate_speeds(changing, ones(3)) == SpeedEstimate(ones(3), uncertain=True)


def test_one_odd_layer_does_not_make_its_rank_slow() -> None:
    some = samples([1, 1, 1])
    odd = some[7]
    some[7] = odd._replace(seconds=tuple(4 * x for x in odd.seconds))  # pyright: ignore
    assert estimate_speeds(some, ones(3)).speeds == ones(3)


def test_known_speeds_stay_until_the_evidence_is_clear() -> None:
    near = 0.5 * (1 + NOISE / 2)
    assert estimate_speeds(samples([1, near, 1]), (1, 0.5, 1)).speeds == (1, 0.5, 1)
    assert estimate_speeds(samples([1, 0.25, 1]), (1, 0.5, 1)).speeds == (1, 0.25, 1)


def test_a_rank_that_recovers_has_the_speed_1_again() -> None:
    assert estimate_speeds(samples([1, 1.01, 1]), (1, 0.5, 1)).speeds == ones(3)


def test_layers_of_a_kind_that_one_rank_has_say_nothing() -> None:
    alone = [always(rank, rank, 1.0 + rank) for rank in range(3)]
    assert estimate_speeds(alone, (1, 0.5, 1)) == SpeedEstimate((1, 0.5, 1))


def test_ops_without_work_or_without_a_reading_say_nothing() -> None:
    empty = [always(0, "a", 1.0, work=0.0), always(1, "a", 0.0)]
    assert estimate_speeds(empty, ones(2)).speeds == ones(2)


def test_ranks_are_compared_over_the_kinds_that_they_share() -> None:
    pairs = [(0, "a", 1.0), (1, "a", 2.0), (1, "b", 6.0), (2, "b", 3.0), (3, "b", 3.0)]
    chain = [always(rank, kind, seconds) for rank, kind, seconds in pairs]
    assert estimate_speeds(chain, ones(4)).speeds == (1, 0.5, 1, 1)
