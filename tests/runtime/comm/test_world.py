"""Waits time out and name the waiting rank and the late rank."""

from __future__ import annotations

import re

import pytest
import torch

from dynmo.errors import RunError
from dynmo.runtime.comm.agreement import agree
from tests.pool import Pool
from tests.runtime.alone import alone

JOBS = "tests.runtime.jobs.world:"


def test_missing_rank_is_named_after_the_timeout(pool: Pool) -> None:
    for rank, (kind, text) in enumerate(pool.run(JOBS + "one_never_comes", 2)):
        assert kind == "WaitTimeout"
        assert text.startswith(f"rank {rank} waited 1 s for rank 2 ")


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("sum", "rank 0 waited 0.5 s for rank 1: the end of the test"),
        ("message", "rank 0 waited 1.5 s for rank 1: the activation of microbatch 3"),
    ],
)
def test_late_rank_is_named_after_the_timeout(pool: Pool, what: str, text: str) -> None:
    waiting, away = pool.run(JOBS + "one_is_late", 2, what=what)
    kind, told = waiting
    assert kind == "WaitTimeout"
    assert told.startswith(text)
    assert "parallel.timeout" in told
    assert away == []


def test_ranks_can_meet_after_a_failed_rendezvous(pool: Pool) -> None:
    assert pool.run(JOBS + "after_a_failed_rendezvous", 3) == [[3.0]] * 3


def test_dead_rank_is_named_at_once(pool: Pool) -> None:
    """The failure shows when the receive is posted or when the rank waits for it."""
    (kind, text), _ = pool.run(JOBS + "one_is_late", 2, what="gone")
    assert kind == "RankDied"
    assert re.match(
        r"rank 0 lost rank 1 while waiting for (a message|the activation of microbatch 3) \(", text
    )


def test_duplicate_rank_is_refused(pool: Pool) -> None:
    """The second process has a wrong RANK, or the MASTER_PORT of another run."""
    said = pool.run(JOBS + "all_are_rank_0", 2)
    assert sum("another process is rank 0 of this run, too" in text for text in said) == 1
    assert sum("waited 1 s for rank 1 to join" in text for text in said) == 1


def test_world_of_one_rank_needs_no_peers() -> None:
    world = alone()
    world.barrier("nobody")
    agree(world, b"0123456789", "the plan")
    assert world.sum(torch.ones(2), "nothing").tolist() == [1, 1]
    world.open_channels([(0, 0, 1)])
    with pytest.raises(RunError, match="rank 0 lost rank 3 while waiting for it"):
        world.fail(RuntimeError("connection reset"), [3], "it")
