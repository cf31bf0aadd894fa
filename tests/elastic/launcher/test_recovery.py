"""The launcher of a run that survives a dead rank. The ranks are emulated, but for one run."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from dynmo.errors import RankDied, RunError, WaitTimeout
from tests.elastic.launcher.emulated import (
    EmulatedProcess,
    EmulatedRun,
    Script,
    Steps,
    ends,
    launch,
    stops,
)
from tests.elastic.run_launcher import LOSES_TWO, RECOVERS, launcher_command, reports_of

RELEASED = "released 1: 1 process of this machine ended; memory and device are free"
LOOKS = 1500  # of the launcher: 30 s


def test_rank_goes_on_without_a_dead_and_a_stopped_one(
    start_here: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = start_here(launcher_command("local", tmp_path, *LOSES_TWO), RECOVERS)
    out, err = process.communicate(timeout=50)
    assert (process.returncode, err) == (0, "")
    killed = "was ended by SIGKILL; out of memory?"
    assert out == f"{killed} and did not answer and was ended\n"
    assert reports_of(tmp_path) == [RELEASED] * 2


def dies(me: EmulatedProcess) -> Steps:
    yield
    return -9


def test_run_goes_on_without_a_dead_rank(tmp_path: Path) -> None:
    """Its process is given back. A newcomer can take its place."""

    def first(me: EmulatedProcess) -> Steps:
        yield from me.until(lambda: me.arbiter.has_ended(1))
        assert me.arbiter.how_it_ended(1) == "was ended by SIGKILL; out of memory?"
        assert not me.arbiter.has_ended(2)
        me.ranks_are(0, 2)
        yield from me.reports(1)
        me.give_back(1, stay=[0, 2])
        me.start(1)
        yield from me.reports(2)
        me.ranks_are(0, 2, 3)
        yield from [None] * LOOKS
        return 0

    def joins(me: EmulatedProcess) -> Steps:
        yield from [None] * 2 * LOOKS
        return 0

    status, told = launch(
        tmp_path, first, dies, ends(after=2 * LOOKS), join=joins, recovers_within=9.0
    )
    assert status == 0
    assert told == [RELEASED, "started 1: process 3 runs on here"]


def test_rank_that_does_not_answer_is_ended_on_request(tmp_path: Path) -> None:
    def first(me: EmulatedProcess) -> Steps:
        yield
        me.arbiter.end(1)
        yield from me.until(lambda: me.arbiter.has_ended(1))
        assert me.arbiter.how_it_ended(1) == "did not answer and was ended"
        me.ranks_are(0)
        yield from me.reports(1)
        return 0

    assert launch(tmp_path, first, stops, recovers_within=9.0) == (0, [RELEASED])


def test_rank_0_dies_and_its_successor_goes_on_with_the_messages(tmp_path: Path) -> None:
    def first(me: EmulatedProcess) -> Steps:
        me.start(1)
        yield from me.reports(1)
        return -9

    told = list[str]()

    def second(me: EmulatedProcess) -> Steps:
        yield from me.until(lambda: me.arbiter.has_ended(0))
        me.succeeds()
        me.ranks_are(1, 2)
        yield from me.reports(1)
        told.extend(me.told)
        return 0

    join = ends(after=LOOKS)
    assert launch(tmp_path, first, second, join=join, recovers_within=9.0)[0] == 0
    assert told == [RELEASED]


def test_second_death_gets_its_own_time(tmp_path: Path) -> None:
    def first(me: EmulatedProcess) -> Steps:
        yield from me.until(lambda: me.arbiter.has_ended(2))
        yield from [None] * 300  # 6 s
        me.ranks_are(0)
        yield from [None] * LOOKS
        return 0

    def dies_later(me: EmulatedProcess) -> Steps:
        yield from [None] * 300
        return -9

    assert launch(tmp_path, first, dies, dies_later, recovers_within=9.0)[0] == 0


def waits(me: EmulatedProcess) -> Steps:
    yield from [None] * 9 * LOOKS
    return 0


def loses_rank_1(me: EmulatedProcess) -> Steps:
    yield from [None] * 9
    raise RankDied("rank 0 lost rank 1")


@pytest.mark.parametrize("rank_0", [waits, loses_rank_1, dies])
def test_run_fails_if_nobody_recovers(tmp_path: Path, rank_0: Script) -> None:
    with pytest.raises(RunError, match=r"rank \d was ended by SIGKILL"):
        launch(tmp_path, rank_0, dies, recovers_within=9.0)


def waited_in_vain(me: EmulatedProcess) -> Steps:
    yield
    raise WaitTimeout("rank 0 waited in vain for rank 1 to form a group", [1])


def test_run_ends_soon_once_a_stopped_rank_is_blamed_by_all_others(tmp_path: Path) -> None:
    run = EmulatedRun([waited_in_vain, stops], None)
    with pytest.raises(RunError, match="waited in vain"):
        run.launch(tmp_path, recovers_within=90.0)
    assert run.now < 9


def test_run_fails_with_a_rank_that_is_left(tmp_path: Path) -> None:
    def first(me: EmulatedProcess) -> Steps:
        yield from me.until(lambda: me.arbiter.has_ended(1))
        me.ranks_are(0)
        yield from [None] * LOOKS
        raise RunError("the disk is full")

    with pytest.raises(RunError, match="the disk is full"):
        launch(tmp_path, first, dies, recovers_within=9.0)
