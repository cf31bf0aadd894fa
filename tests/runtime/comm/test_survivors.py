"""Ranks that are left agree on who goes on. They are threads with one store in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch.distributed as dist

from dynmo.errors import RunError
from dynmo.runtime.comm import survivors
from dynmo.runtime.comm.signed_store import SignedStore
from dynmo.runtime.comm.survivors import Members, RollCall


@dataclass
class Launcher:
    """Knows the ranks that have ended, and ends others if it can."""

    ended: set[int] = field(default_factory=set[int])
    asked: list[int] = field(default_factory=list[int])
    obeys: bool = True

    def has_ended(self, rank: int) -> bool:
        return rank in self.ended

    def end(self, rank: int) -> None:
        self.asked.append(rank)
        if self.obeys:
            self.ended.add(rank)


@pytest.fixture
def home() -> SignedStore:
    return SignedStore(dist.HashStore())


def beats(rank: int) -> bytes:
    """The heartbeat of a rank that lives."""
    return f"{rank} {time.monotonic()}".encode()


def silent(_: int) -> None:
    return None


def call(
    home: SignedStore,
    ranks: Sequence[int],
    size: int,
    launcher: Launcher | None,
    *,
    beat: Callable[[int], bytes | None] = silent,
    blames: Sequence[int] = (),
    generation: Callable[[int], int] = lambda _: 0,
    limits: tuple[float, float] = (5.0, 5.0),
) -> list[Any]:
    """The result of each rank that is left. The last one comes later."""

    def run(rank: int) -> Members | str:
        roll_call = RollCall(home, 0, rank, size, beat, launcher, *limits)
        if rank == ranks[-1]:
            time.sleep(0.1)
        try:
            return roll_call.members(generation(rank), blames if rank == ranks[0] else ())
        except RunError as error:
            return str(error)

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(run, ranks))


def test_all_are_awaited_but_those_that_have_ended(home: SignedStore) -> None:
    """The lowest rank is gone. A rank that still computes is awaited. The latest try counts."""
    launcher = Launcher({0})
    found = call(home, [1, 2, 3], 4, launcher, beat=beats, generation=lambda r: 5 * r)
    assert found == [found[0]] * 3
    assert (found[0].ranks, found[0].dead) == ((1, 2, 3), (0,))
    assert found[0].generation > 15
    assert launcher.asked == [], "nobody else was to be ended"


def test_a_silent_rank_is_ended_before_the_others_go_on(home: SignedStore) -> None:
    """It may only have been stopped: it is in no decision, and goes nowhere if it wakes up."""
    launcher = Launcher()
    found = call(home, [0, 2], 3, launcher, limits=(0.8, 5.0))
    assert [(each.ranks, each.dead) for each in found] == [((0, 2), (1,))] * 2
    assert launcher.asked == [1]
    assert call(home, [1], 3, launcher) == [
        "rank 1 was silent for too long: the other ranks went on without it"
    ]


def test_a_rank_that_was_found_silent_is_not_awaited_again(home: SignedStore) -> None:
    launcher, begun = Launcher(), time.monotonic()
    found = call(home, [0, 2], 3, launcher, blames=[1], limits=(30.0, 30.0))
    assert found[0].dead == (1,)
    assert launcher.asked == [1]
    assert time.monotonic() - begun < 5


def test_silence_alone_tells_without_a_launcher(
    home: SignedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(survivors, "_SILENCE", 0.8)
    found = call(home, [0, 2], 3, None, limits=(30.0, 30.0))
    assert (found[0].ranks, found[0].dead) == ((0, 2), (1,))


def test_a_rank_that_dies_in_the_roll_call_is_left_out(home: SignedStore) -> None:
    """The lowest rank is here, and is killed before it decides."""
    launcher = Launcher({3})
    home.within("recover/0").set("here/0", '{"generation": 7, "blames": []}')
    timer = threading.Timer(0.1, launcher.ended.add, [0])
    timer.start()
    found = call(home, [1, 2], 4, launcher)
    assert (found[0].ranks, found[0].dead) == ((1, 2), (0, 3))


def test_what_keeps_ranks_from_going_on_is_one_line(
    home: SignedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = call(home, [0], 2, Launcher(), beat=beats, limits=(5.0, 0.1))
    assert late == [
        "rank 0 waited 0.1 s for rank 1 to go on after a fault; raise parallel.work_timeout"
    ]
    monkeypatch.setattr(survivors, "_END", 0.1)
    hangs = call(SignedStore(dist.HashStore()), [0], 2, Launcher(obeys=False), blames=[1])
    assert hangs == ["rank 0 waited 0.1 s for the launcher to end rank 1, which is silent"]

    def lose(key: str) -> bytes:
        raise RuntimeError(f"connection lost at {key}")

    monkeypatch.setattr(SignedStore, "find", lambda _, key: lose(key))
    lost = call(home, [0], 2, Launcher())
    assert lost == ["rank 0 lost the store of the run after a fault (connection lost at decision)"]
