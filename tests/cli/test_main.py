"""The command line: help, usage errors, and one-line error messages."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import typer

from dynmo import __version__
from dynmo.cli import main
from dynmo.errors import RunError
from dynmo.schedule import catalogue
from tests.cli.runs import Run, assert_refused

SCHEDULE = ("schedule", "--schedule", "zb-h1", "--ranks", "4", "--microbatches")
UNIT = ("--tf", "1", "--tb", "1", "--tw", "1")


def test_help_and_version(dynmo: Run) -> None:
    assert dynmo("--version") == (0, f"dynmo {__version__}\n", "")
    status, out, err = dynmo()
    assert (status, err) == (0, "")
    assert "schedule" in out
    status, out, _ = dynmo("schedule", "--help")
    assert status == 0
    options = ("--memory-limit", "--objective", "--w-memory", "--chunks", "--json")
    assert all(option in out for option in options)


@pytest.mark.parametrize(
    ("arguments", "mentions"),
    [
        (("shedule",), ["'shedule'", "'schedule'"]),
        (("--colour",), ["--colour"]),
        ((*SCHEDULE, 8, "--microbatch", 3), ["--microbatch ", "--microbatches"]),
        (("schedule", "--schedule"), ["--schedule"]),
        ((*SCHEDULE, 8, *UNIT, "extra"), ["extra"]),
        (("report",), ["runs"]),
    ],
)
def test_usage_errors_are_refused(
    dynmo: Run, arguments: tuple[object, ...], mentions: list[str]
) -> None:
    assert_refused(dynmo(*arguments), "--help", *mentions)


def raising(error: BaseException) -> Callable[..., Any]:
    def make(*_: object) -> None:
        raise error

    return make


def break_schedules(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    catalogue.by_hand.cache_clear()
    monkeypatch.setitem(catalogue.SCHEDULES, "zb-h1", catalogue._Entry(raising(error)))


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (RunError("rank 3\nis gone"), 1, "dynmo: rank 3 is gone"),
        (KeyboardInterrupt(), 130, "dynmo: interrupted"),
        (typer.Abort(), 130, "dynmo: interrupted"),
    ],
)
def test_errors_become_one_line(
    dynmo: Run, monkeypatch: pytest.MonkeyPatch, error: BaseException, status: int, line: str
) -> None:
    break_schedules(monkeypatch, error)
    assert dynmo(*SCHEDULE, 8, *UNIT) == (status, "", line + "\n")


def test_internal_error_names_its_location(dynmo: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    break_schedules(monkeypatch, KeyError("oops"))
    mentions = ("dynmo/schedule/", "KeyError: 'oops'", "DYNMO_TRACEBACK=1")
    assert_refused(dynmo(*SCHEDULE, 8, *UNIT), *mentions, status=1)
    monkeypatch.setenv("DYNMO_TRACEBACK", "1")
    err = dynmo(*SCHEDULE, 8, *UNIT).err
    assert "Traceback (most recent call last)" in err
    assert err.splitlines()[-1].startswith("dynmo: ")


def test_closed_output_pipe_is_no_error() -> None:
    command = [sys.executable, "-m", "dynmo", *SCHEDULE, "2000", *UNIT, "--json", "--ops"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(10) == '{"schedule'
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(60) == 1


def test_an_interrupt_while_a_command_is_loaded_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dynmo.cli.import_module", Mock(side_effect=KeyboardInterrupt))
    assert main(["plan"]) == 130
    assert capsys.readouterr().err == "dynmo: interrupted\n"


def test_interrupted_command_waits_for_no_thread() -> None:
    """A thread that plans cannot be interrupted."""
    lines = (
        "import time, dynmo.__main__",
        "from concurrent.futures import ThreadPoolExecutor",
        "ThreadPoolExecutor(1).submit(time.sleep, 600)",
        "dynmo.__main__.main = lambda: 130",
        "dynmo.__main__.run()",
    )
    done = subprocess.run([sys.executable, "-c", "; ".join(lines)], timeout=60, check=False)
    assert done.returncode == 130
