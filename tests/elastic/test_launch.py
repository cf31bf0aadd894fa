"""What rank 0 and its launcher tell each other through the store."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist

from dynmo.elastic.launch import FolderStore, LauncherManager, Messages
from dynmo.elastic.manager import RankPlace, Report
from dynmo.runtime.comm.signed_store import SignedStore

LEAVING = [RankPlace(2, "host", 7, "host", 2)]


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


def test_next_rank_0_goes_on_with_the_messages(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    told, asked, counts = Messages(store, "told"), Messages(store, "asked"), (0, 0)
    for number in range(2):
        manager = LauncherManager(store, *counts)
        manager.start(number)
        told.send(asdict(Report("started", f"process {number}", 1, 0.0)))
        assert [report.what for report in manager.watch()] == [f"process {number}"]
        assert [*asked.receive()] == [{"start": number}]
        counts = manager.counts


def test_message_that_cannot_be_sent_is_a_report(tmp_path: Path) -> None:
    """The folder is away for a while. The run goes on, and asks again later."""
    manager = LauncherManager(FolderStore(tmp_path / "away"))
    manager.give_back(LEAVING, [])
    manager.start(3)
    told = manager.watch()
    assert [(report.kind, report.ranks) for report in told] == [("failed", 0), ("failed", 3)]
    assert all("the launcher cannot be told" in report.what for report in told)
    assert manager.watch() == []
    (tmp_path / "away").mkdir()
    manager.start(3)
    asked = Messages(FolderStore(tmp_path / "away"), "asked")
    assert [*asked.receive()] == [{"start": 3}]
    assert [*asked.receive()] == []
