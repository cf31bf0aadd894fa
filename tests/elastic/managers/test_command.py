"""CommandManager with real commands.

The tests cover the input of commands and the handling of failed commands.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from dynmo.elastic.manager import Manager, RankPlace, Report
from dynmo.elastic.managers.command import CommandManager
from dynmo.errors import ConfigError
from tests.processes import wait_until

LEFT = (RankPlace(2, "b", 12, "n2"), RankPlace(3, "b", 13))
STAY = (RankPlace(0, "a", 10), RankPlace(1, "a", 11))


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@contextmanager
def open_manager(
    give_back: Sequence[str], start: Sequence[str] = (), timeout: float = 30.0
) -> Iterator[CommandManager]:
    manager = CommandManager(give_back, start, timeout)
    try:
        yield manager
    finally:
        manager.close()


def wait_for(manager: Manager, count: int = 1) -> list[Report]:
    reports: list[Report] = []

    def enough() -> bool:
        reports.extend(manager.watch())
        return len(reports) >= count

    wait_until(enough)
    assert len(reports) == count, reports
    assert all("\n" not in report.what for report in reports)
    return reports


def test_release_command_gets_who_left_and_who_stays(tmp_path: Path) -> None:
    out = tmp_path / "got.json"
    code = (
        "import json, os, pathlib, sys;"
        f"pathlib.Path({str(out)!r}).write_text(json.dumps(dict(os.environ)));"
        "assert sys.stdin.read() == '';"
        "print('first'); print('2 nodes are free'); print()"
    )
    with open_manager(python(code)) as manager:
        assert isinstance(manager.name, str)
        manager.give_back(LEFT, STAY)
        (report,) = wait_for(manager)
    assert (report.kind, report.ranks) == ("released", 2)
    assert report.what.startswith("elastic.release_command (")
    assert report.what.endswith(": 2 nodes are free")
    assert report.seconds > 0
    env = json.loads(out.read_text())
    assert json.loads(env["DYNMO_LEFT"]) == [
        {"rank": 2, "host": "b", "pid": 12, "node": "n2"},
        {"rank": 3, "host": "b", "pid": 13, "node": "b"},
    ]
    assert [m["rank"] for m in json.loads(env["DYNMO_STAY"])] == [0, 1]
    assert env["PATH"] == os.environ["PATH"]


def test_request_command_gets_a_count_and_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = ["DYNMO_RENDEZVOUS", "DYNMO_RENDEZVOUS_FILE", "DYNMO_PROCESS"]
    launched += ["DYNMO_LAUNCHER", "DYNMO_LAUNCHER_NODE"]
    for variable in ("RANK", "WORLD_SIZE", "MASTER_ADDR", *launched, "TORCHELASTIC_X"):
        monkeypatch.setenv(variable, "7")
    code = (
        "import os;print(os.environ['DYNMO_COUNT'], [k for k, v in os.environ.items() if v == '7'])"
    )
    with open_manager(["true"], python(code)) as manager:
        assert manager.can_start
        manager.start(2)
        (report,) = wait_for(manager)
    assert (report.kind, report.ranks) == ("started", 2)
    assert report.what.endswith(": 2 []")


def test_commands_run_in_order(tmp_path: Path) -> None:
    first = f"until [ -e {tmp_path}/go ]; do sleep 0.02; done; touch {tmp_path}/done"
    with open_manager(["sh", "-c", first], ["test", "-e", f"{tmp_path}/done"]) as manager:
        manager.give_back(LEFT, STAY)
        manager.start(1)
        (tmp_path / "go").touch()
        assert [report.kind for report in wait_for(manager, 2)] == ["released", "started"]


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (python("print('no such node'); raise SystemExit(3)"), "status 3: no such node"),
        (python("import os; os.kill(os.getpid(), 9)"), "SIGKILL"),
        (["/nowhere/give-back"], "No such file or directory"),
        (["/"], "Permission denied"),
        (["true", "\0"], "null byte"),
    ],
)
def test_failure_gives_a_one_line_error(command: list[str], says: str) -> None:
    with open_manager(command) as manager:
        manager.give_back(LEFT, STAY)
        (report,) = wait_for(manager)
    assert (report.kind, report.ranks) == ("failed", 0)
    assert says in report.what
    assert "elastic.release_command" in report.what


def test_output_of_any_size_and_encoding() -> None:
    code = (
        "import sys;sys.stdout.buffer.write(b'x' * 10_000_000 + b'\\n\\xff\\x1b[1m' + b'y' * 1000)"
    )
    with open_manager(python(code)) as manager:
        manager.give_back(LEFT, STAY)
        (report,) = wait_for(manager)
    assert report.kind == "released"
    assert len(report.what) < 400
    assert report.what.isprintable()


def test_timeout_kills_the_process_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hours pass once the command has begun."""
    pids, begun = tmp_path / "pids", tmp_path / "begun"
    code = f"echo $$ > {pids}; sleep 60 & echo $! >> {pids}; echo begun; touch {begun}; wait"
    hours = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: 3600.0 * next(hours) if begun.exists() else 0.0)
    for module in ("command", "threaded"):
        monkeypatch.setattr(f"dynmo.elastic.managers.{module}.time", clock)
    with open_manager(["sh", "-c", code], timeout=2) as manager:
        manager.give_back(LEFT, STAY)
        (report,) = wait_for(manager)
    assert report.kind == "failed"
    assert report.seconds >= 3600
    assert "over 2 s" in report.what
    assert report.what.endswith(": begun")
    for pid in pids.read_text().split():
        assert_ended(int(pid))


def test_processes_in_the_background_live_on(tmp_path: Path) -> None:
    """Ranks that a command starts hold its output open.

    They are neither awaited nor ended.
    """
    command = ["sh", "-c", f"sleep 60 & echo $! > {tmp_path}/pid; echo one rank"]
    with open_manager(["true"], command) as manager:
        manager.start(1)
        (report,) = wait_for(manager)
    assert report.kind == "started"
    pid = int((tmp_path / "pid").read_text())
    os.kill(pid, 0)
    os.kill(pid, 9)


def test_close_waits_for_short_commands_and_kills_slow_commands(tmp_path: Path) -> None:
    short = CommandManager(["true"], [], 30)
    short.give_back(LEFT, STAY)
    short.close(30)
    assert [report.kind for report in short.watch()] == ["released"]

    long = CommandManager(["sh", "-c", f"echo $$ > {tmp_path}/pid; sleep 60"], ["true"], 30)
    long.give_back(LEFT, STAY)
    long.start(1)
    wait_until(lambda: (tmp_path / "pid").exists())
    long.close(0)
    killed, dropped = wait_for(long, 2)
    assert {killed.kind, dropped.kind} == {"failed"}
    assert "killed" in killed.what
    assert all("the run has ended" in report.what for report in (killed, dropped))
    assert_ended(int((tmp_path / "pid").read_text()))


def test_close_without_any_call() -> None:
    manager = CommandManager(["true"], [], 30)
    assert not manager.can_start
    manager.close()
    manager.close()
    assert manager.watch() == []


def test_check(tmp_path: Path) -> None:
    plain = tmp_path / "give-back"
    plain.write_text("#!/bin/sh\n")
    with pytest.raises(ConfigError, match=r"elastic.release_command: .*give-back"):
        CommandManager([str(plain)], [], 1).check()
    plain.chmod(0o755)
    CommandManager([str(plain)], [], 1).check()
    CommandManager([str(plain)], ["true", "x"], 1).check()
    with pytest.raises(ConfigError, match=r"elastic.grow_command: .*'nowhere-x'"):
        CommandManager([str(plain)], ["nowhere-x"], 1).check()
    with pytest.raises(ConfigError, match=r"elastic.release_command"):
        CommandManager([], ["true"], 1).check()


def assert_ended(pid: int) -> None:
    """A killed process that nobody has reaped yet is a zombie, which has no folder."""
    wait_until(lambda: not Path(f"/proc/{pid}/cwd").exists())
