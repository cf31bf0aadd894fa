"""Waiting has an end, and says who waits for whom."""

from __future__ import annotations

import re

import pytest
import torch

from dynmo.errors import RunError
from dynmo.runtime.rendezvous import ALONE
from dynmo.runtime.world import World, open_store
from tests.pool import Pool
from tests.runtime.alone import alone

JOBS = "tests.runtime.jobs.world:"


def test_a_rank_that_never_comes(pool: Pool) -> None:
    for rank, (kind, text) in enumerate(pool.run(JOBS + "one_never_comes", 2)):
        assert kind == "WaitTimeout"
        assert text == f"rank {rank} waited 1 s for rank 2 to join; started with too few ranks?"


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("sum", "rank 0 waited 1.5 s for rank 1: the end of the test"),
        ("message", "rank 0 waited 1.5 s for rank 1: the activation of microbatch 3"),
    ],
)
def test_a_rank_that_stays_away(pool: Pool, what: str, text: str) -> None:
    waiting, away = pool.run(JOBS + "one_is_late", 2, what=what)
    assert waiting == ["WaitTimeout", f"{text}; where it only takes longer, raise parallel.timeout"]
    assert away == []


def test_a_meeting_that_failed_is_forgotten(pool: Pool) -> None:
    assert pool.run(JOBS + "after_a_failed_meeting", 3) == [[3.0]] * 3


def test_a_rank_that_is_gone(pool: Pool) -> None:
    """Known at once, not after the limit: as the receive is posted, or as it is waited for."""
    (kind, text), _ = pool.run(JOBS + "one_is_late", 2, what="gone")
    assert kind == "RankDied"
    assert re.match(r"rank 0 lost rank 1 while waiting for (a message|the activation of microbatch 3) \(", text)


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (["a", "a", "a"], ""),
        (["a", None, "a"], ""),
        ([None, None, None], ""),
        (["a", "b", "a"], "rank 0 and rank 1 disagree on the plan"),
        (["a", "b", "b"], "rank 0 and ranks 1, 2 disagree on the plan"),
        ([None, "a", "b"], "rank 1 and rank 2 disagree on the plan"),
    ],
)
def test_agree(pool: Pool, said: list[str | None], text: str) -> None:
    """All ranks find out, those that said nothing too."""
    results = pool.run(JOBS + "agree", 3, said=said)
    assert len(set(results)) == 1
    assert results[0].split(";")[0] == text


def test_a_process_that_no_launcher_started() -> None:
    with pytest.raises(
        RunError, match=r"started alone, in no world of ranks: start it with torchrun, or .*`from_environment\(\) or ALONE`"
    ):
        open_store(None, 5)
    store = open_store(ALONE, 5)
    world = World.join(store, ALONE.rank, ALONE.size, timeout=5)
    try:
        assert world.sum(torch.ones(2), "nothing").tolist() == [1, 1]
    finally:
        world.close()


def test_a_world_of_one() -> None:
    world = alone()
    world.barrier("nobody")
    world.agree(b"0123456789", "the plan")
    assert world.sum(torch.ones(2), "nothing").tolist() == [1, 1]
    world.open_channels([(0, 0, 1)])
    with pytest.raises(RunError, match="rank 0 lost rank 3 while waiting for it"):
        world.fail(RuntimeError("connection reset"), [3], "it")
