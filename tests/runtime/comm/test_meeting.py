"""Processes meet through a file with rank 0's address.

Others open the same store later.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from dynmo.errors import RunError, WaitTimeout
from dynmo.runtime.comm.rendezvous import ALONE, Rendezvous
from dynmo.runtime.comm.store import meeting_of, open_meeting, open_store

TIMEOUT = 5.0


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # restored after the test, however it was
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")


def place(rank: int, file: Path) -> Rendezvous:
    return Rendezvous(rank, 2, 0, meeting=str(file))


def listening_addresses(port: int) -> list[str]:
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    lines += Path("/proc/net/tcp6").read_text().splitlines()[1:]
    local = [line.split()[1].split(":") for line in lines if line.split()[3] == "0A"]
    return [address for address, number in local if int(number, 16) == port]


def test_ranks_meet_through_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 may come first. The file is the user's alone, and so is the port."""
    file = tmp_path / "meeting.json"
    stores: list[dist.Store] = []
    thread = threading.Thread(target=lambda: stores.append(open_store(place(1, file), TIMEOUT)))
    thread.start()
    first = open_store(place(0, file), TIMEOUT)
    thread.join(TIMEOUT)
    first.set("a", "1")
    assert stores[0].get("a") == b"1"
    record = json.loads(file.read_text())
    assert record == meeting_of(place(0, file))
    assert record["address"] == "127.0.0.1"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert listening_addresses(record["port"]) == ["0100007F"]
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert open_meeting(record, TIMEOUT).get("a") == b"1"


def test_rank_0_does_not_come(tmp_path: Path) -> None:
    said = r"rank 1 waited 0.1 s for rank 0, which has not written its address to .*/meeting.json"
    with pytest.raises(WaitTimeout, match=said) as raised:
        open_store(place(1, tmp_path / "meeting.json"), 0.1)
    assert raised.value.ranks == (0,)


def test_an_address_that_is_not_rank_0s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1.nowhere.invalid")
    with pytest.raises(RunError, match=r"rank 0 could not open a store at .*; set MASTER_ADDR to"):
        open_store(place(0, tmp_path / "meeting.json"), 0.5)
    assert list(tmp_path.iterdir()) == []


def test_a_joiner_opens_the_store_of_local_ranks(tmp_path: Path) -> None:
    local = Rendezvous(0, 1, 0, folder=str(tmp_path))
    store = open_store(local, TIMEOUT)
    store.set("a", "1")
    joiner = open_meeting(meeting_of(local), TIMEOUT)
    assert joiner.get("a") == b"1"
    joiner.set("b", "2")
    del joiner
    assert store.get("b") == b"2", "a joiner that leaves takes the file away"


def test_a_joiner_opens_the_store_of_torchruns_ranks() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    first = Rendezvous(0, 1, 0, address="127.0.0.1", port=port, loopback=True)
    store = open_store(first, TIMEOUT)
    store.set("a", "1")
    assert open_meeting(meeting_of(first), TIMEOUT).get("a") == b"1"


def test_the_run_is_over(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for record, where in (
        ({"address": "127.0.0.1", "port": port}, f"at 127.0.0.1:{port}"),
        ({"folder": str(tmp_path)}, f"in {tmp_path}"),
    ):
        with pytest.raises(RunError, match=f"the run that met {where} is not running any more"):
            open_meeting(record, TIMEOUT)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_nobody_can_join() -> None:
    with pytest.raises(RunError, match="no other process can join it"):
        meeting_of(ALONE)
