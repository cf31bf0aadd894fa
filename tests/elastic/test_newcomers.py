"""Newcomers that wait, are let in, are dismissed, or vanish."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dynmo.elastic import newcomer, newcomers
from dynmo.elastic.manager import RankPlace
from dynmo.elastic.newcomer import Newcomer, newcomer_from, newcomer_text
from dynmo.elastic.newcomers import Handover, Newcomers
from dynmo.errors import ConfigError, RankDied, RunError, WaitTimeout
from dynmo.events import FaultEvent
from dynmo.models.identity import Identity
from dynmo.plan.options import Elastic
from dynmo.runtime.comm import store as store_module
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.comm.signed_store import SignedStore
from tests.processes import wait_until

IDENTITY = Identity(versions={}, code={}, layers=(), descriptions={})


@pytest.fixture
def home() -> SignedStore:
    store = SignedStore(dist.HashStore())
    store.set_timeout(timedelta(seconds=20))
    return store


def entrance(home: SignedStore, timeout: float = 5, former: Handover | None = None) -> Newcomers:
    world = Meeting.outside(home, device=torch.device("cpu"), timeout=timeout)
    return Newcomers(Elastic(), world, IDENTITY, former)


class Waiting:
    """A newcomer in a thread."""

    def __init__(self, home: SignedStore, host: str) -> None:
        self.heard: list[str | None] = []
        self.told_to_go = False
        text = newcomer_text(RankPlace(-1, host, 7, host), IDENTITY)
        self._newcomer = Newcomer(home, text, 5)
        self.thread = threading.Thread(target=self._wait)
        self.thread.start()

    def _wait(self) -> None:
        self.heard.append(self._newcomer.wait(lambda: self.told_to_go))

    def end(self) -> str | None:
        self.thread.join(5)
        (heard,) = self.heard
        return heard


class Clock:
    """Time that passes while a newcomer sleeps. `looks` is called then."""

    now = 0.0

    def __init__(self) -> None:
        self.looks: Callable[[], None] = lambda: None

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.looks()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time of both sides. Rank 0 has no thread, and looks when a test says so."""
    clock = Clock()
    for module in (newcomer, newcomers):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(Newcomers, "_watch", lambda *_: None)
    return clock


def wait_for(run: Newcomers, count: int) -> None:
    wait_until(lambda: run.look(at_once=True) == count, 5)


def faults(run: Newcomers) -> list[str]:
    run.look(at_once=True)
    return [event.what for event in run.take_events(0) if isinstance(event, FaultEvent)]


def test_thread_of_a_dropped_entrance_ends(home: SignedStore) -> None:
    """A newcomer would take it for rank 0's sign of life, for ever."""
    before = {*threading.enumerate()}
    own = entrance(home)
    (thread,) = {*threading.enumerate()} - before
    del own
    assert not thread.is_alive(), "nor does it outlive Python"


def test_newcomers_are_let_in_in_order_of_arrival(home: SignedStore) -> None:
    run = entrance(home)
    assert run.look(at_once=True) == 0
    first = Waiting(home, "a")
    wait_for(run, 1)
    second = Waiting(home, "b")
    wait_for(run, 2)
    assert [str(place) for place in run.let_in(["rank 2 of 3"])] == ["a:7"]
    assert first.end() == "rank 2 of 3"
    assert run.look(at_once=True) == run.waiting == 1
    run.close()
    assert second.end() is None, "the run is over"


@pytest.mark.parametrize("dies", [False, True])
def test_newcomers_wait_on_when_rank_0_leaves_or_dies(home: SignedStore, dies: bool) -> None:
    """Those that were let in or refused do not come again."""
    former = entrance(home)
    first, second = Waiting(home, "a"), Waiting(home, "b")
    wait_for(former, 2)
    former.let_in(["rank 2 of 3"])
    other = Waiting(home, "c")
    wait_for(former, 2)
    run = entrance(home, former=Handover() if dies else former.handover())
    if dies:
        wait_until(lambda: run.look(at_once=True) == 3, 5)  # the one that was let in, too
        run.go_on()
    former.close(left=True)
    wait_for(run, 2)
    last = Waiting(home, "d")
    wait_for(run, 3)
    run.let_in(["1", "2", "3"])
    ends = [each.end() for each in (first, second, other, last)]
    assert sorted(map(str, ends)) == ["1", "2", "3", "rank 2 of 3"]


def test_next_rank_0_knows_whom_the_former_one_asked_for(
    home: SignedStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = mock.Mock(can_start=True, watch=list)
    manager.name = "command"
    monkeypatch.setattr(newcomers, "make_manager", lambda *_: manager)
    former = entrance(home)
    former.start(2)
    clock.now += 1000
    run = entrance(home, former=former.handover())
    run.start(2)
    manager.start.assert_called_once_with(2)
    assert "was asked for 2 more ranks 1000 s ago" in faults(run)[0]


def test_ranks_are_asked_for_beside_those_that_wait(
    home: SignedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = mock.Mock(can_start=True, watch=list)
    manager.name = "command"
    monkeypatch.setattr(newcomers, "make_manager", lambda *_: manager)
    run = entrance(home)
    run.start(1)
    waiting = Waiting(home, "a")
    wait_for(run, 1)
    run.start(1)
    run.start(1)  # it is on its way
    assert manager.start.mock_calls == [mock.call(1), mock.call(1)]
    run.let_in(["state"])
    assert waiting.end() == "state"


def test_machine_of_the_next_rank_0_may_lack_the_manager(home: SignedStore) -> None:
    """A run has begun, so it goes on."""
    elastic = Elastic(releaser="command", release_command=["no-such"])
    world = Meeting.outside(home, device=torch.device("cpu"), timeout=5)
    with pytest.raises(ConfigError, match="no-such"):
        Newcomers(elastic, world, IDENTITY)
    run = Newcomers(elastic, world, IDENTITY, Handover())
    assert "no-such" in faults(run)[0]


def test_dismissed_newcomer_returns_none(home: SignedStore) -> None:
    waiting = Waiting(home, "a")
    wait_for(entrance(home), 1)
    waiting.told_to_go = True
    assert waiting.end() is None


def test_vanished_newcomer_is_removed(home: SignedStore, clock: Clock) -> None:
    run = entrance(home)
    clock.looks = run._read
    text = newcomer_text(RankPlace(-1, "a", 7, "a"), IDENTITY)
    assert Newcomer(home, text, 5).wait(lambda: clock.now > 20) is None
    assert run.look(at_once=True) == 1
    for _ in range(2):
        clock.sleep(7)
    assert faults(run) == ["a:7 waited to join and is gone"]
    assert run.waiting == 0
    assert faults(run) == []


def test_silent_rank_0_times_out(home: SignedStore, clock: Clock) -> None:
    with pytest.raises(WaitTimeout, match=r"b:7 waited 0\.3 s for rank 0"):
        Newcomer(home, "a", 0.3, "b:7").wait()
    assert clock.now == pytest.approx(0.3, abs=0.06)


def test_newcomer_waits_while_rank_0_is_busy(home: SignedStore, clock: Clock) -> None:
    """Rank 0 gives signs of life in a step that takes longer than the limit."""
    clock.looks = entrance(home, 2)._read
    assert Newcomer(home, "a", 2).wait(lambda: clock.now > 20) is None


def test_damaged_store_stops_neither_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch reads on and on in a file that ends within a value."""
    monkeypatch.setattr(newcomers, "_SLACK", 0.05)
    monkeypatch.setattr(store_module, "SLACK", 0.05)
    file = tmp_path / "store"
    store = SignedStore(dist.FileStore(str(file), 1))
    run, outside = entrance(store, 0.1), Newcomer(store, "a", 0.1)
    with file.open("ab", buffering=0) as other:
        other.write(b"\x08\0\0\0half")
    with pytest.raises(WaitTimeout, match="rank 0"):
        outside.wait()
    told: list[str] = []
    wait_until(lambda: bool(told.extend(faults(run)) or told), 5)
    assert faults(run) == [], "once"
    assert "nobody can join" in told[0]
    assert run.waiting == 0
    with pytest.raises(WaitTimeout, match="the store of the run"):
        run._send("over", "1")
    run.close()
    with file.open("ab") as other:  # or torch's threads would go on reading in this process
        other.write(b"rest\0\0\0\0")


def test_newcomer_with_an_unreadable_text_disturbs_no_other(home: SignedStore) -> None:
    store = home.within("join")
    store.claim("ticket/1")
    store.set("beat/1", "0")
    store.set("here/1", b"\xff\x1b[31m")
    run, waiting = entrance(home), Waiting(home, "a")
    wait_for(run, 1)
    wait_until(lambda: store.find("refused/1") is not None, 5)
    refused = "newcomer 1 wanted to join and was refused: what it says of itself cannot be read"
    assert faults(run) == [refused]
    run.close()
    assert waiting.end() is None


def test_closed_store_is_an_error() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    outside = Newcomer(SignedStore(client), "a", 5)
    del server
    with pytest.raises(RankDied, match="rank 0"):
        outside.wait()


@pytest.mark.parametrize("text", ["", "\x1b[31m", "[]", "3", '{"rank": 1}', "{}"])
def test_text_that_is_no_newcomers_is_an_error(text: str) -> None:
    with pytest.raises(RunError, match="what it says of itself"):
        newcomer_from(text)
