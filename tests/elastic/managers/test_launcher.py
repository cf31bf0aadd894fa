"""The launcher as a resource manager, if its folder cannot be written."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynmo.elastic import launch_folder
from dynmo.elastic.launch_folder import LaunchFolder
from dynmo.elastic.managers.launcher import LauncherManager
from dynmo.elastic.member import Member

LEAVING = [Member(2, "host", 7, "host", 2)]


def full(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


def test_note_that_cannot_be_written_is_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run goes on, and asks again later."""
    manager = LauncherManager(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(launch_folder, "write_whole", full)
        manager.release(LEAVING, [])
        manager.request(3)
    told = manager.reports()
    assert [(report.kind, report.ranks) for report in told] == [("failed", 0), ("failed", 3)]
    assert all("No space left on device" in report.what for report in told)
    assert manager.reports() == []
    manager.request(3)
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
