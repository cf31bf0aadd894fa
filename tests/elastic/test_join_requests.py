"""Newcomers that wait, are called, are dismissed, or vanish."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from dynmo.elastic import join_requests
from dynmo.elastic.join_requests import JoinRequests, Newcomer, newcomer_from
from dynmo.errors import RankDied, RunError, WaitTimeout
from dynmo.runtime.comm import store as store_module
from dynmo.runtime.comm.signed_store import SignedStore
from tests.processes import wait_until


@pytest.fixture
def home() -> SignedStore:
    store = SignedStore(dist.HashStore())
    store.set_timeout(timedelta(seconds=20))
    return store


class Waiting:
    """A newcomer in a thread."""

    def __init__(self, home: SignedStore, text: str) -> None:
        self.heard: list[str | None] = []
        self.told_to_go = False
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
    monkeypatch.setattr(join_requests, "time", clock)
    monkeypatch.setattr(JoinRequests, "_watch", lambda self: None)
    return clock


def present(requests: JoinRequests, count: int) -> list[int]:
    wait_until(lambda: len(requests.present()) == count, 5)
    return requests.present()


def test_newcomers_are_called_in_order_of_arrival(home: SignedStore) -> None:
    requests = JoinRequests(home, 5)
    assert requests.present() == []
    first = Waiting(home, "a")
    tickets = present(requests, 1)
    second = Waiting(home, "b")
    tickets = present(requests, 2)
    assert [requests.text(ticket) for ticket in tickets] == ["a", "b"]
    requests.let_in(tickets[:1], ["rank 2 of 3"])
    assert first.end() == "rank 2 of 3"
    assert requests.present() == tickets[1:]
    requests.close()
    assert second.end() is None, "the run is over"


def test_dismissed_newcomer_returns_none(home: SignedStore) -> None:
    waiting = Waiting(home, "a")
    present(JoinRequests(home, 5), 1)
    waiting.told_to_go = True
    assert waiting.end() is None


def test_vanished_newcomer_is_removed(home: SignedStore, clock: Clock) -> None:
    requests, newcomer = JoinRequests(home, 5), Newcomer(home, "a", 5)
    clock.looks = requests._look
    assert newcomer.wait(lambda: clock.now > 20) is None
    (ticket,) = requests.present()
    for _ in range(2):
        clock.sleep(7)
    assert requests.present() == []
    assert requests.take_gone() == [ticket]
    assert requests.take_gone() == []


def test_silent_rank_0_times_out(home: SignedStore, clock: Clock) -> None:
    with pytest.raises(WaitTimeout, match=r"b:7 waited 0\.3 s for rank 0"):
        Newcomer(home, "a", 0.3, "b:7").wait()
    assert clock.now == pytest.approx(0.3, abs=0.06)


def test_newcomer_waits_while_rank_0_is_busy(home: SignedStore, clock: Clock) -> None:
    """Rank 0 gives signs of life in a step that takes longer than the limit."""
    clock.looks = JoinRequests(home, 2)._look
    assert Newcomer(home, "a", 2).wait(lambda: clock.now > 20) is None


def test_damaged_store_stops_neither_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch reads on and on in a file that ends within a value."""
    for module in (join_requests, store_module):
        monkeypatch.setattr(module, "_SLACK", 0.05)
    file = tmp_path / "store"
    store = SignedStore(dist.FileStore(str(file), 1))
    requests, newcomer = JoinRequests(store, 0.1), Newcomer(store, "a", 0.1)
    with file.open("ab", buffering=0) as other:
        other.write(b"\x08\0\0\0half")
    with pytest.raises(WaitTimeout, match="rank 0"):
        newcomer.wait()
    wait_until(lambda: requests.take_problem() is not None, 5)
    assert requests.take_problem() is None, "once"
    assert requests.present() == []
    with pytest.raises(WaitTimeout, match="the store of the run"):
        requests.close()
    with file.open("ab") as other:  # or torch's threads would go on reading in this process
        other.write(b"rest\0\0\0\0")


def test_newcomer_with_an_unreadable_text_disturbs_no_other(home: SignedStore) -> None:
    store = home.within("join")
    store.claim("ticket/1")
    store.set("beat/1", "0")
    store.set("here/1", b"\xff\x1b[31m")
    requests, waiting = JoinRequests(home, 5), Waiting(home, "a")
    first, second = present(requests, 2)
    requests.refuse(first, "it is none")
    assert requests.text(second) == "a"
    requests.close()
    assert waiting.end() is None


def test_closed_store_is_an_error() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    newcomer = Newcomer(SignedStore(client), "a", 5)
    del server
    with pytest.raises(RankDied, match="rank 0"):
        newcomer.wait()


@pytest.mark.parametrize("text", ["", "\x1b[31m", "[]", "3", '{"rank": 1}', "{}"])
def test_text_that_is_no_join_request_is_an_error(text: str) -> None:
    with pytest.raises(RunError, match="what it says of itself"):
        newcomer_from(text)
