"""`make results`: a run replaces its own part of a result file, and nothing if it fails."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from docs.tools import remake

pytestmark = pytest.mark.docs


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> remake.Run:
    monkeypatch.setattr(remake, "RESULTS", tmp_path)
    made = remake.Run("sweeps", "simulated", "--stride 2")
    made.path.write_text(json.dumps({"old": 1, "rows": [1], "machine": "a"}))
    return made


def answer(status: int, printed: object, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    commands: list[list[str]] = []

    def call(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, status, json.dumps(printed), "it broke")

    monkeypatch.setattr(subprocess, "run", call)
    return commands


def test_part_is_replaced(run: remake.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = answer(0, {"rows": [2], "machine": "b"}, monkeypatch)
    assert remake.remake(run, Console(quiet=True))
    assert json.loads(run.path.read_text()) == {"old": 1, "rows": [2], "machine": "b"}
    assert commands[0][1:] == ["-m", "benchmarks.sweeps", "--stride", "2", "--json"]


def test_failed_run_leaves_the_file(
    run: remake.Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(1, {}, monkeypatch)
    before = run.path.read_text()
    assert not remake.remake(run, Console(width=120))
    assert run.path.read_text() == before
    assert "benchmarks.sweeps --stride 2 ended with status 1: it broke" in capsys.readouterr().out


def test_unknown_benchmark_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["remake", "swoops"])
    with pytest.raises(SystemExit) as ended:
        remake.main()
    assert ended.value.code == 2
    assert "no benchmark swoops; there are " in capsys.readouterr().err
