from __future__ import annotations

import threading

import pytest

from dynmo.elastic.managers.threaded import ThreadedManager


def test_machine_without_room_for_a_thread_is_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", full)
    manager = ThreadedManager()
    manager.submit("started", 2, lambda: "done")
    [report] = manager.watch()
    assert (report.kind, report.what, report.ranks) == ("failed", "can't start new thread", 2)
    manager.close()
