"""The launcher of a run that changes its ranks.

Ranks leave and join, and some joiners fail.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.elastic.run_launcher import PATHS, launcher_command, reports_of
from tests.processes import wait_until

Launch = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def go(start_here: Launch, tmp_path: Path) -> Launch:
    """Starts the launcher on ranks that run these scripts."""

    def call(*scripts: str, join: str = "") -> subprocess.Popen[str]:
        return start_here(launcher_command("local", tmp_path, *scripts, join=join), PATHS)

    return call


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, err = process.communicate(timeout=50)
    return process.returncode, err


def test_ranks_leave_and_new_ranks_join(go: Launch, tmp_path: Path) -> None:
    """Two of three ranks leave. Two new processes become ranks with new numbers."""
    process = go(
        """
release(1, 2)
say("leave")
reports(1)
manager.request(2)
heard("member-3")
heard("member-4")
reports(3)
say("done")
""",
        'heard("leave")',
        'heard("leave")',
        join="""
keys = ("DYNMO_JOIN", "RANK", "DYNMO_PROCESS", "LOCAL_RANK")
(here / f"env-{process}").write_text(" ".join(os.environ[key] for key in keys))
become_member()
say(f"member-{process}")
heard("done")
""",
    )
    assert end(process) == (0, "")
    released = "released 2: 2 processes of this machine ended; memory and device are free"
    assert reports_of(tmp_path)[0] == released
    assert sorted(line.partition(" runs")[0] for line in reports_of(tmp_path)[1:]) == [
        "started 1: process 3",
        "started 1: process 4",
    ]
    # The devices of the ranks that left are theirs.
    assert (tmp_path / "env-3").read_text() == "1 3 3 1"
    assert (tmp_path / "env-4").read_text() == "1 4 4 2"
    assert (tmp_path / "rank-4.log").exists()


@pytest.mark.parametrize(
    ("join", "why"),
    [
        ("raise RunError('no\\n room')", "failed: no room"),
        ("sys.exit(3)", "ended with status 3; see {}/rank-1.log"),
        ("os.kill(os.getpid(), 9)", "was ended by SIGKILL"),
        ("", "ended with status 0; see {}/rank-1.log"),
    ],
    ids=["report", "status", "killed", "left"],
)
def test_joiner_that_fails_early_does_not_fail_the_run(
    go: Launch, tmp_path: Path, join: str, why: str
) -> None:
    """The joiner is not a rank yet, so the run ends normally."""
    process = go("manager.request(1)\nreports(2)\ntime.sleep(0.7)\nsay('done')", join=join)
    assert end(process) == (0, "")
    report = reports_of(tmp_path)[-1]
    assert report.startswith("failed 1: process 1 ")
    assert why.format(tmp_path) in report
    assert (tmp_path / "done").exists()


def test_failure_of_a_joined_rank_fails_the_run(go: Launch) -> None:
    process = go(
        "manager.request(1)\nuntil(lambda: signals, 'a signal')",
        join="become_member()\nraise RunError('a peer of process 2 is gone')",
    )
    assert end(process) == (1, "RunError: a peer of process 2 is gone\n")


@pytest.mark.parametrize("late", [False, True])
def test_rank_killed_after_it_left_does_not_fail_the_run(
    go: Launch, tmp_path: Path, late: bool
) -> None:
    """It may have ended before rank 0 says that it left."""
    dies = "heard('left')\nos.kill(os.getpid(), 9)"
    tells = "release(1)\nsay('left')"
    if late:
        dies = dies.replace("heard('left')", "say('up')")
        tells = f"""
heard("up")
until(lambda: not Path("/proc", (here / "up").read_text()).exists(), "the end of rank 1")
{tells}
"""
    process = go(f"{tells}\nreports(2)\nsay('done')", dies)
    assert end(process) == (0, "")
    assert sorted(reports_of(tmp_path)) == [
        "failed 0: process 1 had left the run and was ended by SIGKILL; out of memory?",
        "released 1: 1 process of this machine ended; memory and device are free",
    ]


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(10))
def test_many_ranks_are_killed_after_they_left(tmp_path: Path, seed: int) -> None:
    """32 ranks of a training run, at drawn delays. Some end before they are killed."""
    module = [sys.executable, "-m", "tests.elastic.launcher.kill_leavers"]
    done = subprocess.run(
        [*module, str(tmp_path), "32", str(seed)],
        env=os.environ | PATHS,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["killed"] >= 20


def test_failure_of_a_rank_that_came_back_fails_the_run(go: Launch) -> None:
    process = go(
        "release(1)\nsay('left')\nuntil(lambda: signals, 'a signal')",
        "heard('left')\nbecome_member(2)\ntime.sleep(0.5)\nos.kill(os.getpid(), 9)",
    )
    status, err = end(process)
    assert status == 1
    assert "rank 1 was ended by SIGKILL" in err


def test_waiting_joiner_is_stopped_when_the_run_ends(go: Launch, tmp_path: Path) -> None:
    """The launcher stops the joiner and ignores its exit status."""
    process = go(
        "manager.request(1)\nheard('waits')",
        join="say('waits')\nuntil(lambda: signals, 'a signal')\nsay('asked')\nsys.exit(7)",
    )
    assert end(process) == (0, "")
    assert (tmp_path / "asked").exists()


@pytest.mark.matrix
def test_unresponsive_joiner_is_killed(go: Launch, tmp_path: Path) -> None:
    process = go(
        "manager.request(1)\nheard('waits')",
        join="say('waits')\nuntil(lambda: False, 'nothing')",
    )
    assert end(process) == (0, "")


def test_a_signal_reaches_ranks_and_joiners(go: Launch, tmp_path: Path) -> None:
    wait = "say(f'up-{process}')\nuntil(lambda: signals, 'a signal')\nsys.exit(130)"
    process = go("manager.request(1)\n" + wait, wait, join=wait)
    wait_until(lambda: all((tmp_path / f"up-{number}").exists() for number in range(3)))
    os.kill(process.pid, signal.SIGINT)
    assert end(process) == (130, "")


def test_ranks_that_end_with_the_run_release_nothing(go: Launch, tmp_path: Path) -> None:
    """Rank 0 may take long to write its files."""
    process = go("heard('over')\ntime.sleep(0.7)\nimport json\nreports(0)", "say('over')")
    assert end(process) == (0, "")
    assert reports_of(tmp_path) == []


@pytest.mark.matrix
def test_slow_leaver_does_not_hold_back_other_released_ranks(go: Launch, tmp_path: Path) -> None:
    """The other released rank is reported after a while."""
    process = go(
        "release(1, 2)\nsay('leave')\nreports(2)\nsay('done')",
        "heard('leave')",
        "heard('leave')\ntime.sleep(7)",
    )
    assert end(process) == (0, "")
    what = "released 1: 1 process of this machine ended; memory and device are free"
    assert reports_of(tmp_path) == [what, what]
