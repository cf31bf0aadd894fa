"""The measured speed of each rank, and layers that leave a slow one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import pytest
import torch

import dynmo
from dynmo.events import Event, RebalanceEvent, SpeedsEvent
from dynmo.models.emulated import Pace, make_layers
from tests.pool import Pool

MICROBATCHES = 4


def train(
    world: dynmo.World,
    speeds: Sequence[float],
    steps: int,
    later: tuple[int, Sequence[float]] | None = None,
    replicas: int = 1,
    balance: Mapping[str, Any] | None = None,
    seconds: Sequence[float] = (0.006,) * 12,
) -> dict[str, Any]:
    """Trains emulated layers on ranks of these speeds, and of others from a later step on."""
    pace, events = Pace(speeds[world.rank]), list[Event]()
    pipeline = dynmo.Pipeline(
        make_layers(seconds, seconds, seconds, 16, pace=pace),
        world,
        microbatches=MICROBATCHES // replicas,
        schedule="zb-h1",
        replicas=replicas,
        reduction_slots=2,
        balance=dynmo.Balance(**(balance or {})),
        listen=events.append,
        steps=1000,
    )
    data = torch.zeros(MICROBATCHES // replicas, 1, dtype=torch.int64)
    for step in range(steps):
        if later is not None and step == later[0]:
            pace.speed = later[1][world.rank]
        pipeline.step(data, data)
    costs = pipeline.costs()
    return {
        "speeds": [event.speeds for event in events if isinstance(event, SpeedsEvent)],
        "moves": [event.target for event in events if isinstance(event, RebalanceEvent)],
        "seconds": [[cost.f, cost.b, cost.w] for cost in costs],
        "digest": pipeline.digest(),
    }


JOB = "tests.runtime.engine.test_rank_speeds:train"
# What one decision takes for a slow rank on a busy machine, the next one sees again.
OFTEN = {"every": 4}


def test_layers_leave_a_slow_rank_and_the_bits_stay(pool: Pool) -> None:
    slow = [1, 1, 0.5, 1]
    told, *others = pool.run(JOB, 4, speeds=slow, steps=13, balance=OFTEN)
    assert told["speeds"][-1] == pytest.approx(slow, abs=0.08)
    counts = told["moves"][-1]
    assert counts[2] < min(counts[0], counts[1], counts[3])
    # Costs are those of a rank of speed 1, whichever rank measured them.
    assert [median(ops) for ops in told["seconds"]] == pytest.approx([0.006] * 12, rel=0.4)
    none = {"balancer": "none"}
    still = pool.run(JOB, 4, speeds=[1] * 4, steps=13, balance=none, seconds=[0.0] * 12)
    assert {each["digest"] for each in (told, *others, *still)} == {told["digest"]}


@pytest.mark.matrix
def test_a_rank_becomes_slow_and_recovers(pool: Pool) -> None:
    later = (8, [1, 1])
    told = pool.run(JOB, 2, speeds=[1, 0.5], steps=26, later=later)[0]
    assert told["speeds"][0] == pytest.approx([1, 0.5], abs=0.08)
    assert told["speeds"][-1] == [1, 1]
    assert told["moves"][0] == [8, 4]
    assert told["moves"][-1] in ([6, 6], [7, 5])


def test_a_slow_replica_makes_its_pipeline_rank_slow(pool: Pool) -> None:
    """Layers of unlike seconds are compared with themselves on the other replica."""
    seconds = [0.003 * (1 + layer % 4) for layer in range(12)]
    speeds = [1, 1, 1, 0.5]  # ranks 0 and 1 of the pipeline, each on two replicas
    given = {"replicas": 2, "seconds": seconds, "balance": OFTEN}
    told = pool.run(JOB, 4, speeds=speeds, steps=13, **given)[0]
    assert told["speeds"][-1] == pytest.approx([1, 0.5], abs=0.08)
    assert told["moves"][-1][0] > told["moves"][-1][1]


def test_equal_ranks_have_no_speeds(pool: Pool) -> None:
    told = pool.run(JOB, 2, speeds=[1, 1], steps=8)[0]
    assert told["speeds"] == []
    assert told["moves"] == []
