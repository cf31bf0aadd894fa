"""The measured speed of each rank, and layers that leave a slow one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import dynmo
from dynmo.events import Event, RebalanceEvent, SpeedsEvent
from dynmo.models.emulated import Pace, make_layers
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
            reduction_slots=2,
            balance=dynmo.Balance(),
            listen=events.append,
            steps=1000,
        )
        for step in range(steps):
            if later is not None and step == later[0]:
                pace.speed = later[1][world.rank]
            pipeline.step(data, data)
    return {
        "speeds": [event.speeds for event in events if isinstance(event, SpeedsEvent)],
        "moves": [event.target for event in events if isinstance(event, RebalanceEvent)],
        "seconds": [[cost.f, cost.b, cost.w] for cost in pipeline.costs()],
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


def test_a_slow_replica_makes_its_pipeline_rank_slow(pool: Pool) -> None:
    """Layers of unlike seconds are compared with themselves on the other replica."""
    seconds = [0.5 * (1 + layer % 4) for layer in range(12)]
    speeds = [1, 1, 1, 0.5]  # ranks 0 and 1 of the pipeline, each on two replicas
    told = pool.run(JOB, 4, speeds=speeds, steps=9, replicas=2, seconds=seconds)[0]
    assert told["speeds"] == [[1, 0.5]]
    assert told["moves"][-1][0] > told["moves"][-1][1]
