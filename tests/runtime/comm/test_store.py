"""The store in which processes meet: alone, at an address, or through a file."""

from __future__ import annotations

import json
import os
import socket
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dynmo.errors import ConfigError, RunError, WaitTimeout
from dynmo.files import write_whole
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.comm.process_groups import await_all
from dynmo.runtime.comm.rendezvous import ALONE, Rendezvous, from_environment, read_rendezvous
from dynmo.runtime.comm.store import (
    _attempt,
    find_missing,
    open_rendezvous,
    open_store,
    rendezvous_record,
    serve,
)
from tests.cli.runs import free_port

TIMEOUT = 5.0


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # restored after the test, however it was
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")


def place(rank: int, file: Path) -> Rendezvous:
    return Rendezvous(rank, 2, 0, file=str(file))


def listening_addresses(port: int) -> list[str]:
    tables = (Path("/proc/net", name).read_text() for name in ("tcp", "tcp6"))
    rows = [row.split() for table in tables for row in table.splitlines()[1:]]
    local = [row[1].split(":") for row in rows if row[3] == "0A"]
    return [address for address, number in local if int(number, 16) == port]


def test_ranks_meet_through_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank may come first. Only this user can read the file and reach the port."""
    file = tmp_path / "rendezvous.json"
    stores: list[dist.Store] = []
    thread = threading.Thread(target=lambda: stores.append(open_store(place(1, file), TIMEOUT)))
    thread.start()
    launchers = serve(file, TIMEOUT)
    thread.join(TIMEOUT)
    launchers.set("a", "1")
    assert stores[0].get("a") == open_store(place(0, file), TIMEOUT).get("a") == b"1"
    record = json.loads(file.read_text())
    assert record == rendezvous_record(place(0, file))
    assert record["address"] == "127.0.0.1"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert listening_addresses(record["port"]) == ["0100007F"]
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert open_rendezvous(record, TIMEOUT).get("a") == b"1"


def test_missing_launcher_times_out(tmp_path: Path) -> None:
    said = r"rank 1 waited 0.1 s for the launcher, which has not written its address to .*json"
    with pytest.raises(WaitTimeout, match=said):
        open_store(place(1, tmp_path / "rendezvous.json"), 0.1)


def test_unusable_address_of_the_launcher_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1.nowhere.invalid")
    with pytest.raises(RunError, match="MASTER_ADDR"):
        serve(tmp_path / "rendezvous.json", 0.5)
    assert list(tmp_path.iterdir()) == []


def test_a_joiner_opens_the_store_of_other_ranks(tmp_path: Path) -> None:
    address: Any = {"address": "127.0.0.1", "port": int(free_port()), "loopback": True}
    for first in (Rendezvous(0, 1, 0, folder=str(tmp_path)), Rendezvous(0, 1, 0, **address)):
        store = open_store(first, TIMEOUT)
        store.set("a", "1")
        joiner = open_rendezvous(rendezvous_record(first), TIMEOUT)
        assert joiner.get("a") == b"1"
        joiner.set("b", "2")
        del joiner
        assert store.get("b") == b"2", "a joiner that leaves takes the file away"


def test_token_of_the_user_may_end_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that joins reads it from rank 0's file."""
    monkeypatch.setenv("DYNMO_TOKEN", "a secret\n")
    first = Rendezvous(0, 1, 0, address="127.0.0.1", port=int(free_port()), loopback=True)
    store = open_store(first, TIMEOUT)
    store.set("a", "1")
    write_whole(tmp_path / "rendezvous.json", json.dumps(rendezvous_record(first)), mode=0o600)
    joiner = open_rendezvous(read_rendezvous(tmp_path / "rendezvous.json"), TIMEOUT)
    assert joiner.get("a") == b"1"
    for wrong in ("two\nlines", "\udcff"):
        monkeypatch.setenv("DYNMO_TOKEN", wrong)
        with pytest.raises(ConfigError, match="DYNMO_TOKEN has"):
            open_store(replace(first, port=int(free_port())), TIMEOUT)


def test_run_that_has_finished_or_shares_no_store_cannot_be_joined(tmp_path: Path) -> None:
    port = int(free_port())
    for record, where in (
        ({"address": "127.0.0.1", "port": port}, f"at 127.0.0.1:{port}"),
        ({"folder": str(tmp_path)}, f"in {tmp_path}"),
    ):
        with pytest.raises(RunError, match=where):
            open_rendezvous(record, TIMEOUT)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RunError, match="no other process can join it"):
        rendezvous_record(ALONE)


def test_process_without_a_launcher_can_run_alone() -> None:
    store = open_store(ALONE, 5)
    world = Meeting.join(store, ALONE.rank, ALONE.size, timeout=5)
    try:
        assert world.sum(torch.ones(2), "nothing").tolist() == [1, 1]
    finally:
        world.close()


@contextmanager
def listener(answer: bytes) -> Iterator[int]:
    """The port of something on this machine that is no store."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_a_port_of_another_program_is_refused_in_one_line(
    capfd: pytest.CaptureFixture[str], answer: bytes
) -> None:
    """`tests/cli/test_train_ends.py` tests a silent program."""
    told = "rank 1 could not meet the others at 127.0.0.1:"
    with listener(answer) as port, pytest.raises(RunError, match=told):
        open_store(Rendezvous(1, 2, 1, address="127.0.0.1", port=port), 0.5)
    assert capfd.readouterr().err == ""


def test_unknown_host_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    place = Rendezvous(1, 2, 1, address="no-such-host.invalid", port=12345)
    with pytest.raises(RunError, match=r"rank 1 .*no-such-host.invalid"):
        open_store(place, 0.3)
    assert capfd.readouterr().err == ""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/net")
def test_loopback_store_listens_on_the_loopback_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other machines cannot reach 127.x. The address of `localhost` depends on the machine."""
    environ = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    environ["MASTER_PORT"] = free_port()
    place = from_environment(environ)
    assert place is not None
    store = open_store(place, 5)
    store.set("a", "b")
    assert listening_addresses(int(environ["MASTER_PORT"])) == ["0100007F"]
    named = from_environment(environ | {"MASTER_ADDR": "localhost"})
    assert named is not None
    assert not named.loopback


class CountedStore:
    """Counts the requests to a store, and the keys in them."""

    def __init__(self) -> None:
        self.store, self.requests, self.keys = dist.HashStore(), 0, 0

    def __getattr__(self, name: str) -> Any:
        def call(keys: Any, *given: Any) -> Any:
            self.requests += 1
            self.keys += len(keys) if isinstance(keys, list) else 1
            return getattr(self.store, name)(keys, *given)

        return call


def test_rank_waits_for_all_with_three_short_requests() -> None:
    store: Any = CountedStore()
    ranks = [threading.Thread(target=await_all, args=(store, "here", 40, 5)) for _ in range(40)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert store.requests == store.keys == 2 * 40 + 1


def test_few_requests_find_the_missing_ranks() -> None:
    store: Any = CountedStore()
    keys = [f"here/{rank}" for rank in range(720)]
    for rank in set(range(720)) - {5, 700}:
        store.store.set(keys[rank], "1")
    assert find_missing(store, keys) == [5, 700]
    assert store.requests < 45
    assert find_missing(store, keys[:5]) == find_missing(store, []) == []


def test_restarts_count_only_in_a_store_that_outlives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """On several machines torchrun's agents count restarts apart."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert _attempt() == "attempt/2"
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert _attempt() == "attempt/0"
