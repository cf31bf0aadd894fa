"""The launcher of a run that changes its ranks.

Ranks leave and join, and some newcomers fail. But for one run the ranks are emulated.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from dynmo.elastic.launcher.rank_side import printed_by_launcher
from dynmo.errors import RunError
from tests.elastic.launcher.emulated import (
    EmulatedProcess,
    EmulatedRun,
    Script,
    Steps,
    ends,
    launch,
    stops,
)
from tests.elastic.run_launcher import PATHS, launcher_command, reports_of

RELEASED = "released 1: 1 process of this machine ended; memory and device are free"


def test_ranks_leave_and_new_ranks_join(
    start_here: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    """Two of three ranks leave. Two new processes become ranks with new numbers."""
    command = launcher_command(
        "local",
        tmp_path,
        """
give_back(1, 2, stay=[0])
say("leave")
reports(1)
manager.start(2)
heard("joined-3")
heard("joined-4")
ranks_are(0, 3, 4)
reports(3)
say("done")
""",
        'heard("leave")',
        'heard("leave")',
        join="""
keys = ("RANK", "DYNMO_PROCESS", "LOCAL_RANK")
(here / f"env-{process}").write_text(" ".join(os.environ[key] for key in keys))
say(f"joined-{process}")
heard("done")
""",
    )
    process = start_here(command, PATHS)
    _, err = process.communicate(timeout=50)
    assert (process.returncode, err) == (0, "")
    released = "released 2: 2 processes of this machine ended; memory and device are free"
    assert reports_of(tmp_path)[0] == released
    assert sorted(line.partition(" runs")[0] for line in reports_of(tmp_path)[1:]) == [
        "started 1: process 3",
        "started 1: process 4",
    ]
    # The devices of the ranks that left are theirs.
    assert (tmp_path / "env-3").read_text() == "3 3 1"
    assert (tmp_path / "env-4").read_text() == "4 4 2"
    assert (tmp_path / "rank-4.log").exists()


def no_room(me: EmulatedProcess) -> Steps:
    yield
    raise RunError("no\n room")


@pytest.mark.parametrize(
    ("join", "why"),
    [
        (no_room, "failed: no room"),
        (ends(3), "ended with status 3; see {}/rank-1.log"),
        (ends(-9), "was ended by SIGKILL; out of memory?"),
        (ends(0), "ended with status 0; see {}/rank-1.log"),
    ],
    ids=["report", "status", "killed", "left"],
)
def test_newcomer_that_fails_early_does_not_fail_the_run(
    tmp_path: Path, join: Script, why: str
) -> None:
    """The newcomer is not a rank yet, so the run goes on and ends normally."""

    def rank_0(me: EmulatedProcess) -> Steps:
        me.start(1)
        yield from me.reports(2)
        yield from [None] * 100

    status, told = launch(tmp_path, rank_0, join=join)
    assert (status, told[0]) == (0, "started 1: process 1 runs on here")
    assert told[1:] == [f"failed 1: process 1 did not join: it {why.format(tmp_path)}"]


def test_failure_of_a_joined_rank_fails_the_run(tmp_path: Path) -> None:
    def rank_0(me: EmulatedProcess) -> Steps:
        me.start(1)
        yield from me.reports(1)
        me.ranks_are(0, 1)
        return (yield from stops(me))

    def join(me: EmulatedProcess) -> Steps:
        yield from [None] * 30
        raise RunError("a peer of process 2 is gone")

    with pytest.raises(RunError, match=r"^a peer of process 2 is gone"):
        launch(tmp_path, rank_0, join=join)


@pytest.mark.parametrize("seed", range(20))
def test_rank_killed_after_it_left_does_not_fail_the_run(tmp_path: Path, seed: int) -> None:
    """It may end before rank 0 says that it left."""
    told, ended = random.Random(seed).sample(range(60), 2)

    def rank_0(me: EmulatedProcess) -> Steps:
        yield from [None] * told
        me.give_back(1)
        yield from me.reports(2)

    status, reports = launch(tmp_path, rank_0, ends(-9, after=ended))
    killed = "failed 0: process 1 had left the run and was ended by SIGKILL; out of memory?"
    assert (status, sorted(reports)) == (0, [killed, RELEASED])


def test_failure_of_a_rank_that_came_back_fails_the_run(tmp_path: Path) -> None:
    def rank_0(me: EmulatedProcess) -> Steps:
        me.give_back(1)
        yield from [None] * 30
        me.ranks_are(0, 1)
        return (yield from stops(me))

    with pytest.raises(RunError, match="rank 1 was ended by SIGKILL"):
        launch(tmp_path, rank_0, ends(-9, after=60))


def test_waiting_newcomer_is_stopped_when_the_run_ends(tmp_path: Path) -> None:
    """The launcher ignores the status of a newcomer that it stops. One that stays is killed."""

    def rank_0(me: EmulatedProcess) -> Steps:
        me.start(2)
        yield from me.reports(2)

    def join(me: EmulatedProcess) -> Steps:
        yield from me.asked()
        if me.number == 1:
            return 7
        while True:
            yield

    run = EmulatedRun([rank_0], join)
    assert run.launch(tmp_path) == 0
    assert [process.code for process in run.processes] == [0, 7, -9]
    assert all(process.signals == [signal.SIGTERM] for process in run.processes[1:])


def test_a_signal_reaches_ranks_and_newcomers(tmp_path: Path) -> None:
    def rank_0(me: EmulatedProcess) -> Steps:
        me.start(1)
        yield from me.reports(1)
        signal.raise_signal(signal.SIGINT)
        return (yield from stops(me))

    assert launch(tmp_path, rank_0, stops, join=stops) == (
        130,
        ["started 1: process 2 runs on here"],
    )


def test_ranks_that_end_with_the_run_release_nothing(tmp_path: Path) -> None:
    """Rank 0 may take long to write its files."""

    def rank_0(me: EmulatedProcess) -> Steps:
        yield from [None] * 1000
        yield from me.reports(0)

    assert launch(tmp_path, rank_0, ends()) == (0, [])


def test_rank_0_leaves_and_another_takes_over(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its process may end before the next rank 0 says so. The terminal shows the next one's log."""

    def rank_1(me: EmulatedProcess) -> Steps:
        yield from [None] * 30
        me.ranks_are(1)
        (tmp_path / "rank-1.log").write_text("step 7\n")
        me.start(1)
        yield from me.reports(1)
        me.ranks_are(1, 2)
        yield from [None] * 30
        with mock.patch.dict(os.environ, me.environment), printed_by_launcher():
            print("the end")

    run = EmulatedRun([ends(after=1), rank_1], ends(after=20))
    assert run.launch(tmp_path) == 0
    assert run.processes[1].told == ["started 1: process 2 runs on here"]
    assert capfd.readouterr() == ("the end\n", "step 7\n")
    with mock.patch.dict(os.environ, {"DYNMO_PROCESS": "0"}), printed_by_launcher():
        print("of the first process")
    assert capfd.readouterr().out == "of the first process\n"


def test_rank_that_came_back_is_not_given_back(tmp_path: Path) -> None:
    def rank_0(me: EmulatedProcess) -> Steps:
        me.give_back(1)
        yield from [None] * 30
        me.ranks_are(0, 1)
        yield from [None] * 100
        yield from me.reports(0)

    assert launch(tmp_path, rank_0, ends(after=60)) == (0, [])


def test_slow_leaver_does_not_hold_back_other_released_ranks(tmp_path: Path) -> None:
    """The other released rank is reported after a while."""

    def rank_0(me: EmulatedProcess) -> Steps:
        me.give_back(1, 2)
        yield from me.reports(1)
        assert slow.processes[2].code is None
        yield from me.reports(2)

    slow = EmulatedRun([rank_0, ends(), ends(after=1000)], None)
    assert slow.launch(tmp_path) == 0
    assert slow.processes[0].told == [RELEASED, RELEASED]
