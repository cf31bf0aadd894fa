"""Newcomers that wait, are called, are dismissed, or vanish."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from dynmo.errors import RankDied, WaitTimeout
from dynmo.runtime.comm import lobby
from dynmo.runtime.comm.lobby import Lobby, Newcomer, read_all, tell_all
from tests.processes import wait_until


@pytest.fixture
def home() -> dist.Store:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=5))
    return store


class Waiting:
    """A newcomer in a thread."""

    def __init__(self, home: dist.Store, text: str) -> None:
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


def present(desk: Lobby, count: int) -> list[int]:
    wait_until(lambda: len(desk.present()) == count, 5)
    return desk.present()


def test_newcomers_are_called_in_order_of_arrival(home: dist.Store) -> None:
    desk = Lobby(home, 5)
    assert desk.present() == []
    first = Waiting(home, "a")
    tickets = present(desk, 1)
    second = Waiting(home, "b")
    tickets = present(desk, 2)
    assert [desk.text(ticket) for ticket in tickets] == ["a", "b"]
    desk.summon(tickets[:1], ["rank 2 of 3"])
    assert first.end() == "rank 2 of 3"
    assert desk.present() == tickets[1:]
    desk.close()
    assert second.end() is None, "the run is over"


def test_dismissed_newcomer_returns_none(home: dist.Store) -> None:
    waiting = Waiting(home, "a")
    present(Lobby(home, 5), 1)
    waiting.told_to_go = True
    assert waiting.end() is None


def test_vanished_newcomer_is_removed(home: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lobby, "_GONE", 0.2)
    desk, waiting = Lobby(home, 5), Waiting(home, "a")
    tickets = present(desk, 1)
    waiting.told_to_go = True
    waiting.end()
    wait_until(lambda: desk.present() == [], 5)
    assert desk.take_gone() == tickets
    assert desk.take_gone() == []


def test_silent_rank_0_times_out(home: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lobby, "_BEAT", 0.05)
    start = time.monotonic()
    with pytest.raises(WaitTimeout, match=r"b:7 waited 0\.3 s for rank 0"):
        Newcomer(home, "a", 0.3, "b:7").wait()
    assert time.monotonic() - start < 3


def test_newcomer_waits_while_rank_0_is_busy(home: dist.Store) -> None:
    """Rank 0 gives signs of life in a step that takes longer than the limit."""
    desk, newcomer = Lobby(home, 1), Newcomer(home, "a", 1)
    end = time.monotonic() + 1.5
    assert newcomer.wait(lambda: time.monotonic() > end) is None
    desk.close()


def test_damaged_store_stops_neither_side(tmp_path: Path) -> None:
    """torch reads on and on in a file that ends within a value."""
    file = tmp_path / "store"
    store = dist.FileStore(str(file), 1)
    desk, newcomer = Lobby(store, 0.4), Newcomer(store, "a", 0.4)
    with file.open("ab") as other:
        other.write(b"\x08\0\0\0half")
    with pytest.raises(WaitTimeout, match="rank 0"):
        newcomer.wait()
    wait_until(lambda: desk.take_problem() is not None, 5)
    assert desk.take_problem() is None, "once"
    assert desk.present() == []
    with pytest.raises(WaitTimeout, match="the store of the run"):
        desk.close()
    with pytest.raises(WaitTimeout, match="the store of the run"):
        read_all(store, "member", 1, 0.1)
    file.write_bytes(b"")


def test_newcomer_with_an_unreadable_text_disturbs_no_other(home: dist.Store) -> None:
    store: Any = dist.PrefixStore("lobby", home)  # it takes bytes, which its types deny
    store.set("beat/1", "0")
    store.set("here/1", b"\xff\x1b[31m")
    store.add("tickets", 1)
    desk, waiting = Lobby(home, 5), Waiting(home, "a")
    first, second = present(desk, 2)
    desk.refuse(first, "it is none")
    assert desk.text(second) == "a"
    desk.close()
    assert waiting.end() is None


def test_closed_store_is_an_error() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    newcomer = Newcomer(client, "a", 5)
    del server
    with pytest.raises(RankDied, match="rank 0"):
        newcomer.wait()


def test_ranks_exchange_messages(home: dist.Store) -> None:
    for rank in range(3):
        tell_all(home, "member", rank, f"host {rank}", 1)
    assert read_all(home, "member", 3, 1) == ["host 0", "host 1", "host 2"]
    with pytest.raises(WaitTimeout, match=r"ranks \[3\]"):
        read_all(home, "member", 4, 0.1)
