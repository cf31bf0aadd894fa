"""What rank 0 and its launcher tell each other through the store."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from dynmo.elastic import launch
from dynmo.elastic.launch import FolderStore, LauncherManager, Messages
from dynmo.elastic.manager import Report
from dynmo.elastic.place import RankPlace
from dynmo.runtime.comm.signed_store import SignedStore

LEAVING = [RankPlace(2, "host", 7, "host", 2)]


def test_file_is_that_of_torch(tmp_path: Path) -> None:
    """Both sides read what the other has written, the last value of each key."""
    torchs = dist.FileStore(str(tmp_path / "store"), 2)
    torchs.set_timeout(timedelta(seconds=5))
    own = FolderStore(tmp_path)
    assert not own.check(["a"])
    torchs.set("a", "1")
    own.set("b", "")
    own.set("a", "2" * 300)
    assert own.check(["a", "b"])
    assert (own.get("a"), own.get("b")) == (b"2" * 300, b"")
    assert (torchs.get("a"), torchs.get("b")) == (b"2" * 300, b"")
    torchs.set("a", "3")
    assert own.check(["a"])
    assert own.get("a") == b"3"


def test_half_a_value_is_read_once_it_is_whole(tmp_path: Path) -> None:
    store, other = FolderStore(tmp_path), FolderStore(tmp_path)
    Messages(other, "asked").send({"start": 2})
    file = tmp_path / "store"
    whole = file.read_bytes()
    asked = Messages(store, "asked")
    for size in range(len(whole)):
        file.write_bytes(whole[:size])
        assert [*asked.receive()] == []
    file.write_bytes(whole)
    assert [*asked.receive()] == [{"start": 2}]
    assert [*asked.receive()] == []


def test_forged_messages_take_no_other_with_them() -> None:
    plain = dist.HashStore()
    store = SignedStore(plain, b"the token")
    told, manager = Messages(store, "told"), LauncherManager(store)
    for number in range(1, 9):
        plain.set(f"launcher/told/{number}", "forged")
    for number in range(2):
        told.send(asdict(Report("released", f"node {number}", 1, 0.0)))
        assert [report.what for report in manager.watch()] == [f"node {number}"]
        assert manager.watch() == []


def test_message_that_cannot_be_sent_is_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process holds the lock. The run goes on, and asks again later."""
    monkeypatch.setattr(launch, "_LOCKED", 0.0)
    code = "import fcntl, sys; fcntl.flock(file := open(sys.argv[1], 'w'), 2); print(); input()"
    manager = LauncherManager(FolderStore(tmp_path))
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "store")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        manager.give_back(LEAVING, [])
        manager.start(3)
        holder.communicate(b"\n")
    told = manager.watch()
    assert [(report.kind, report.ranks) for report in told] == [("failed", 0), ("failed", 3)]
    assert all("the launcher cannot be told" in report.what for report in told)
    assert manager.watch() == []
    manager.start(3)
    assert [*Messages(FolderStore(tmp_path), "asked").receive()] == [{"start": 3}]


def test_full_disk_leaves_the_store_whole(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    store = FolderStore(tmp_path)
    store.set("a", "1")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30, limits[1]))
    try:
        with pytest.raises(OSError, match=r"space|large"):
            store.set("b", "2" * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    store.set("c", "3")
    other = FolderStore(tmp_path)
    assert not other.check(["b"])
    assert other.check(["a", "c"])
