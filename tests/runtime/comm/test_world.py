"""Waits and disagreements of ranks end with an error that names the ranks."""

from __future__ import annotations

import contextlib
import re
import time
from typing import Any

import pytest
import torch

from dynmo.errors import RunError, WaitTimeout
from dynmo.runtime.comm.agreement import agree, first_difference
from dynmo.runtime.comm.meeting import Meeting
from tests.combinations import mostly_matrix
from tests.pool import Pool
from tests.runtime.alone import alone
from tests.runtime.jobs import error_of, lose_patience

JOBS = "tests.runtime.comm.test_world:"


def one_never_comes(world: Meeting) -> list[str]:
    world.barrier("all to be here")
    world.close()
    return error_of(
        lambda: Meeting.join(world.store, world.rank, world.size + 1, timeout=1, generation=1)
    )


def test_missing_rank_is_named_after_the_timeout(pool: Pool) -> None:
    for rank, (kind, text) in enumerate(pool.run(JOBS + "one_never_comes", 2)):
        assert kind == "WaitTimeout"
        assert text.startswith(f"rank {rank} waited 1 s for rank 2 ")


def one_is_late(world: Meeting, what: str) -> list[str]:
    """Rank 1 stays away from what rank 0 waits for."""

    def wait(world: Meeting) -> None:
        if world.rank == 1 and what == "gone":
            world.close()
        elif world.rank == 1:
            world.store.wait(["named"])
        elif what == "sum":
            world.sum(torch.zeros(1), "the end of the test")
        else:
            world.wait(world.receive(torch.zeros(1), 1, 0), 1, "the activation of microbatch 3")

    if what == "sum":
        lose_patience(world)
    world.barrier("all to be here")
    if what == "message":  # its limit is that with which the world was made
        world.close()
        world = Meeting.join(world.store, world.rank, 2, timeout=1.5, generation=1)
    caught = error_of(lambda: wait(world))
    if world.rank == 0:
        world.store.set("named", "1")
    world.close()
    return caught


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("sum", "rank 0 waited 0.5 s for rank 1: the end of the test"),
        ("message", "rank 0 waited 1.5 s for rank 1: the activation of microbatch 3"),
    ],
)
def test_late_rank_is_named_after_the_timeout(pool: Pool, what: str, text: str) -> None:
    (kind, told), away = pool.run(JOBS + "one_is_late", 2, what=what)
    assert kind == "WaitTimeout"
    assert told.startswith(text)
    assert "parallel.timeout" in told
    assert away == []


def sets_up(world: Meeting, what: str) -> list[Any]:
    """Rank 1 is late in the set-up, and hangs after it."""
    world.barrier("all to be here")
    world.close()
    world = Meeting.join(world.store, world.rank, 2, timeout=0.7, generation=1, work_timeout=1.5)
    view, told = world.view([(0, 1)], "a view"), list[Any]()

    def wait() -> None:
        if what == "sum":
            view.sum(torch.zeros(1), "the sum")
        elif world.rank == 1:
            view.wait(view.send(torch.zeros(1), 0, 1), 0, "the message")
        else:
            view.wait(view.receive(torch.zeros(1), 1, 1), 1, "the message")

    if world.rank == 1:
        time.sleep(1)
    wait()
    world.end_setup()
    told += [view.timeout, world.usual_timeout]
    told += error_of(lambda: world.store.wait(["named"]) if world.rank == 1 else wait())
    world.store.set("named", "1")
    world.close(failed=True)
    return told


@pytest.mark.parametrize("what", mostly_matrix(["sum", "message"], ["message"]))
def test_set_up_has_a_limit_of_its_own(pool: Pool, what: str) -> None:
    told, late = pool.run(JOBS + "sets_up", 2, what=what)
    assert told[:3] == [0.7, 0.7, "WaitTimeout"]
    assert re.match(rf"rank 0 waited [23] s for rank 1: the {what}; rank 1 runs code", told[3])
    assert told[3].endswith("raise parallel.work_timeout")
    assert late == [0.7, 0.7]


def test_dead_rank_is_named_at_once(pool: Pool) -> None:
    """The failure shows when the receive is posted or when the rank waits for it."""
    (kind, text), _ = pool.run(JOBS + "one_is_late", 2, what="gone")
    assert kind == "RankDied"
    assert re.match(
        r"rank 0 lost rank 1 while waiting for (a message|the activation of microbatch 3) \(", text
    )


def after_a_failed_rendezvous(world: Meeting) -> list[float]:
    """Rank 0 waits in vain for a group of two. Then all meet."""
    world.barrier("all to be here")
    world.close()
    if world.rank == 0:
        with contextlib.suppress(WaitTimeout):
            Meeting.join(world.store, 0, 2, timeout=0.5, generation=1)
    rejoined = Meeting.join(world.store, world.rank, world.size, timeout=10, generation=2)
    try:
        return rejoined.sum(torch.ones(1), "the sum").tolist()
    finally:
        rejoined.close()


def test_ranks_can_meet_after_a_failed_rendezvous(pool: Pool) -> None:
    assert pool.run(JOBS + "after_a_failed_rendezvous", 3) == [[3.0]] * 3


def all_are_rank_0(world: Meeting) -> list[str]:
    """The ranks meet anew, each as rank 0 of two."""
    world.barrier("all to be here")
    world.close()
    return error_of(lambda: Meeting.join(world.store, 0, 2, timeout=1, generation=1))


def test_duplicate_rank_is_refused(pool: Pool) -> None:
    """The second process has a wrong RANK, or the MASTER_PORT of another run."""
    said = [text for _, text in pool.run(JOBS + "all_are_rank_0", 2)]
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


# -- decisions -------------------------------------------------------------------------------------

SAID = [
    (["a", "a", "a"], []),
    (["a", None, "a"], []),
    ([None, None, None], []),
    (["a", "b", "a"], ["rank 0 and rank 1 disagree on the plan"]),
    (["a", "b", "b"], ["rank 0 and ranks 1, 2 disagree on the plan"]),
    ([None, "a", "b"], ["rank 1 and rank 2 disagree on the plan"]),
]
LISTS = [
    (["ab", "ab", "ab"], None),
    (["abc", "axc", "abx"], [1, [1]]),
    (["abc", "abx", "aby"], [2, [1, 2]]),
    (["ab", "abc", "ab"], [2, [1]]),
    (["", "a", ""], [0, [1]]),
]


def decide(world: Meeting, said: list[list[str | None]]) -> list[list[str]]:
    return [error_of(lambda each=each: agree(world, each[world.rank], "the plan")) for each in said]


def test_disagreeing_ranks_are_named_on_all_ranks(pool: Pool) -> None:
    """Ranks that took no part in the decision get the same message."""
    for told in pool.run(JOBS + "decide", 3, said=[said for said, _ in SAID]):
        assert [[text.split(";")[0] for text in each[1:]] for each in told] == [x for _, x in SAID]


def compare(world: Meeting, lists: list[list[str]]) -> list[tuple[int, list[int]] | None]:
    return [first_difference(world, list(each[world.rank]), "the lists") for each in lists]


def test_compare_finds_the_first_difference(pool: Pool) -> None:
    told = pool.run(JOBS + "compare", 3, lists=[lists for lists, _ in LISTS])
    assert told == [[difference for _, difference in LISTS]] * 3
