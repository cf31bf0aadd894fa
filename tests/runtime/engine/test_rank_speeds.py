"""The measured speed of each rank, and layers that leave a slow one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dynmo
from dynmo.change_events import RebalanceEvent, SlowRankEvent, SpeedsEvent
from dynmo.elastic.manager import own_node
from dynmo.events import Event
from dynmo.models.emulated import Pace, make_layers
from dynmo.runtime.engine.rank_speeds import NOISE, Sample, SpeedEstimate, estimate_speeds
from tests.pool import Pool
from tests.runtime.fake_time import emulated_time

MICROBATCHES = 4


def train(
    world: dynmo.World,
    speeds: Sequence[float],
    steps: int,
    later: tuple[int, Sequence[float]] | None = None,
    replicas: int = 1,
    seconds: Sequence[float] = (1.0,) * 12,
) -> dict[str, Any]:
    """Trains emulated layers on ranks of these speeds, and of others from a later step on."""
    pace, events = Pace(speeds[world.rank]), list[Event]()
    data = torch.zeros(MICROBATCHES // replicas, 1, dtype=torch.int64)
    with emulated_time():
        pipeline = dynmo.Pipeline(
            make_layers(seconds, seconds, seconds, 16, pace=pace),
            world,
            microbatches=MICROBATCHES // replicas,
            schedule="zb-h1",
            replicas=replicas,
            balance=dynmo.Balance(),
            steps=1000,
            parallel=dynmo.Parallel(reduction_slots=2),
            log=dynmo.Log(listen=events.append),
        )
        for step in range(steps):
            if later is not None and step == later[0]:
                pace.speed = later[1][world.rank]
            pipeline.step(data, data)
    return {
        "speeds": [event.speeds for event in events if isinstance(event, SpeedsEvent)],
        "slow": [
            [event.rank, event.factor, event.machine, event.twin]
            for event in events
            if isinstance(event, SlowRankEvent)
        ],
        "moves": [event.target for event in events if isinstance(event, RebalanceEvent)],
        "seconds": [[cost.f, cost.b, cost.w] for cost in pipeline.measured.costs()],
        "digest": pipeline.digest(),
    }


JOB = "tests.runtime.engine.test_rank_speeds:train"


def test_layers_leave_a_slow_rank_and_the_bits_stay(pool: Pool) -> None:
    slow = [1, 1, 0.5, 1]
    told, *others = pool.run(JOB, 4, speeds=slow, steps=9)
    assert told["speeds"] == [slow]
    counts = told["moves"][-1]
    assert counts[2] < min(counts[0], counts[1], counts[3])
    # Costs are those of a rank of speed 1, whichever rank measured them.
    assert told["seconds"] == [pytest.approx([1.0] * 3)] * 12
    still = pool.run(JOB, 4, speeds=[1] * 4, steps=9, seconds=[2.0] * 12)
    assert {each["digest"] for each in (told, *others, *still)} == {told["digest"]}
    assert (still[0]["speeds"], still[0]["moves"]) == ([], [])


def test_a_rank_becomes_slow_and_recovers(pool: Pool) -> None:
    told = pool.run(JOB, 2, speeds=[1, 0.5], steps=20, later=(8, [1, 1]))[0]
    assert told["speeds"] == [[1, 0.5], [1, 1]]
    assert told["moves"] == [[8, 4], [6, 6]]
    assert told["slow"] == [], "not for several windows"


def test_a_rank_that_stays_slow_is_named(pool: Pool) -> None:
    told = pool.run(JOB, 2, speeds=[1, 0.5], steps=40, later=(25, [1, 1]))[0]
    assert told["slow"] == [[1, 2, own_node(), None], [1, 1, own_node(), None]]
    assert told["moves"] == [[8, 4], [6, 6]]


def test_a_slow_replica_makes_its_pipeline_rank_slow(pool: Pool) -> None:
    """Layers of unlike seconds are compared with themselves on the other replica."""
    seconds = [0.5 * (1 + layer % 4) for layer in range(12)]
    speeds = [1, 1, 1, 0.5]  # ranks 0 and 1 of the pipeline, each on two replicas
    told = pool.run(JOB, 4, speeds=speeds, steps=20, replicas=2, seconds=seconds)[0]
    assert told["speeds"] == [[1, 0.5]]
    assert told["slow"] == [[3, 2, own_node(), 2]]
    assert told["moves"][-1][0] > told["moves"][-1][1]


# -- from the times of layers that are alike -------------------------------------------------------


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
