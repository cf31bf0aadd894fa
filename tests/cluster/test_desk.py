"""The launcher as a resource manager, if its folder cannot be written."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynmo.cluster import launch_folder
from dynmo.cluster.desk import LauncherDesk
from dynmo.cluster.launch_folder import LaunchFolder
from dynmo.cluster.releaser import Member

LEAVING = [Member(2, "host", 7, "host", 2)]


def full(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


def test_note_that_cannot_be_written_is_a_receipt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run goes on, and asks again later."""
    desk = LauncherDesk(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(launch_folder, "write_whole", full)
        desk.release(LEAVING, [])
        desk.request(3)
    told = desk.receipts()
    assert [(receipt.kind, receipt.ranks) for receipt in told] == [("failed", 0), ("failed", 3)]
    assert all("No space left on device" in receipt.what for receipt in told)
    assert desk.receipts() == []
    desk.request(3)
    folder = LaunchFolder(tmp_path)
    assert folder.next_note("wanted", folder.names()) == {"count": 3}


def test_mark_that_cannot_be_written_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Path, "touch", full)
    LaunchFolder(tmp_path).leave(2, 1)
    LaunchFolder(tmp_path).become_member(2, 3)
    first, second = caplog.messages
    assert "left-2-1 cannot be written" in first
    assert "member-2-3 cannot be written" in second
