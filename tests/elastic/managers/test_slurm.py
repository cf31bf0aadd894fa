"""Ranks under a real Slurm cluster.

Other jobs use the released nodes. New ranks join as jobs.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from dynmo.elastic.manager import RankCommand
from dynmo.elastic.managers.slurm import SlurmProcess, SlurmStarter, own_job_environment
from dynmo.errors import ConfigError, RunError
from tests.elastic.run_launcher import (
    LENDS_TWO,
    LOSES_TWO,
    PATHS,
    RECOVERS,
    STOPS_WHEN_ASKED,
    check_that_ranks_end_with,
    launcher_command,
    reports_of,
)
from tests.elastic.slurm import SlurmCluster, slurm_cluster, why_no_slurm
from tests.processes import gone, wait_until

_has_slurm = pytest.mark.skipif(why_no_slurm() is not None, reason=str(why_no_slurm()))


def needs_slurm(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.clusters(_has_slurm(test))


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    with slurm_cluster() as cluster:
        yield cluster


launcher = partial(launcher_command, "slurm")


def outside(
    slurm: SlurmCluster, folder: Path, command: list[str], options: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """Starts a launcher outside of any allocation."""
    return slurm.start(command, folder, {**PATHS, "JOB_OPTIONS": json.dumps(options)})


@needs_slurm
def test_another_job_uses_released_nodes(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Two of four ranks leave, and a pending job starts on their nodes.

    Two ranks join as separate jobs when that job has ended.
    """
    command = launcher(
        tmp_path,
        *LENDS_TWO,
        join="""
keys = ("SLURM_JOB_ID", "SLURM_JOB_NAME", "LOCAL_RANK")
(here / f"env-{process}").write_text(" ".join(os.environ[key] for key in keys))
say(f"joined-{process}")
heard("done")
""",
    )
    job = slurm.submit(command, 4, "train", tmp_path / "out", PATHS, [f"--chdir={tmp_path}"])
    slurm.wait_for_state("train", "RUNNING")
    wait = "import pathlib, time\nwhile not pathlib.Path('end').exists(): time.sleep(0.05)"
    options = [f"--chdir={tmp_path}"]
    other_command = [sys.executable, "-c", wait]
    other = slurm.submit(other_command, 2, "another", tmp_path / "out2", options=options)
    assert slurm.states()["another"] == "PENDING"
    (tmp_path / "another-waits").touch()
    slurm.wait_for_state("another", "RUNNING")
    assert slurm.nodes_of(other) == ["n3", "n4"]
    assert slurm.nodes_of(job) == ["n1", "n2"]
    (tmp_path / "end").touch()
    slurm.wait_for_state("another", None)
    (tmp_path / "another-is-over").touch()
    slurm.wait_for_state("train", None)
    assert (tmp_path / "out").read_text() == "result\n"
    assert reports_of(tmp_path)[0] == f"released 2: job {job} gave back n3, n4"
    started = [line.split() for line in reports_of(tmp_path)[1:]]
    assert {fields[3] for fields in started} == {"4", "5"}
    assert {fields[-1] for fields in started} == {"n3", "n4"}, "in any order"
    jobs = {(tmp_path / f"env-{number}").read_text() for number in (4, 5)}
    assert jobs == {f"{other + 1} dynmo-join 0", f"{other + 2} dynmo-join 0"}
    assert (tmp_path / "rank-1.log").read_text() == ""
    wait_until(lambda: not slurm.states(), 90)
    assert gone(tmp_path)


@needs_slurm
def test_shared_node_is_free_once_both_ranks_left(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Four ranks run on two nodes.

    The second node is free once both of its ranks have left. The launcher's node is never free.
    """
    command = launcher(
        tmp_path,
        """
give_back(3, stay=[0, 1, 2])
say("leave-3")
reports(1)
give_back(1, stay=[0, 2])
say("leave-1")
reports(2)
give_back(2, stay=[0])
say("leave-2")
reports(3)
print(os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"])
""",
        "heard('leave-1')",
        "heard('leave-2')",
        "print(os.environ['LOCAL_RANK'], file=sys.stderr)\nheard('leave-3')",
    )
    options = [f"--chdir={tmp_path}", "--nodelist=n1,n2"]
    job = slurm.submit(command, 2, "shared", tmp_path / "out", PATHS, options)
    slurm.wait_for_state("shared", None)
    assert reports_of(tmp_path) == [
        "failed 0: n2 cannot be given back until its last rank leaves",
        "failed 0: n1 cannot be given back until its last rank leaves",
        f"released 1: job {job} gave back n2",
    ]
    assert (tmp_path / "out").read_text() == "0 2\n"
    assert (tmp_path / "rank-3.log").read_text() == "1\n"


@needs_slurm
def test_ranks_outside_an_allocation_are_jobs(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Each rank is a job and frees its node when it ends.

    A newcomer may wait for its job until the run ends.
    """
    command = launcher(
        tmp_path,
        """
heard("up")
give_back(1, stay=[0])
say("leave")
reports(1)
manager.start(4)
reports(4)
heard("pending")
print("result")
""",
        "say('up')\nheard('leave')",
        join="until(lambda: signals, 'a signal')",
    )
    process = outside(slurm, tmp_path, command)
    running = {"dynmo RUNNING": 1, "dynmo-join RUNNING": 3, "dynmo-join PENDING": 1}
    lines = ["squeue", "--noheader", "--format=%j %T"]
    wait_until(lambda: Counter(slurm.run(*lines).splitlines()) == running, 90)
    (tmp_path / "pending").touch()
    out, err = process.communicate(timeout=90)
    assert (process.returncode, out, err) == (0, "result\n", "")
    assert reports_of(tmp_path)[0] == "released 1: 1 job ended"
    assert [line.partition(" runs")[0] for line in reports_of(tmp_path)[1:]]
    wait_until(lambda: not slurm.states(), 90)


@needs_slurm
def test_run_goes_on_without_a_dead_and_a_stopped_rank(slurm: SlurmCluster, tmp_path: Path) -> None:
    command = launcher(tmp_path, *LOSES_TWO)
    slurm.submit(command, 3, "loses", tmp_path / "out", RECOVERS, [f"--chdir={tmp_path}"])
    slurm.wait_for_state("loses", None)
    killed = "was ended by SIGKILL; out of memory?"
    assert (tmp_path / "out").read_text() == f"{killed} and did not answer and was ended\n"
    kept = "is kept for a rank in place of the dead one"
    assert reports_of(tmp_path) == [f"released 1: n{node} {kept}" for node in (2, 3)]
    wait_until(lambda: gone(tmp_path), 30)


@needs_slurm
def test_newcomer_takes_the_place_of_a_dead_rank(slurm: SlurmCluster, tmp_path: Path) -> None:
    """The second one is a job of its own, since the place is taken."""
    command = launcher(
        tmp_path,
        """
ended(1)
ranks_are(0)
manager.start(2)
heard("joined-2")
heard("joined-3")
say("done")
""",
        "os.kill(os.getpid(), signal.SIGKILL)",
        join="""
keys = ("SLURM_JOB_ID", "SLURMD_NODENAME", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
(here / f"env-{process}").write_text(" ".join(os.environ[key] for key in keys))
say(f"joined-{process}")
heard("done")
""",
    )
    options = [f"--chdir={tmp_path}", "--nodelist=n1,n2"]
    job = slurm.submit(command, 2, "replaced", tmp_path / "out", RECOVERS, options)
    slurm.wait_for_state("replaced", None)
    assert (tmp_path / "out").read_text() == ""
    assert (tmp_path / "env-2").read_text() == f"{job} n2 0 1"
    assert (tmp_path / "env-3").read_text().split()[0] == str(job + 1)
    wait_until(lambda: not slurm.states(), 90)


@needs_slurm
def test_job_refused_by_slurm_is_reported(slurm: SlurmCluster, tmp_path: Path) -> None:
    command = launcher(tmp_path, "manager.start(1)\nreports(1)")
    process = outside(slurm, tmp_path, command, ["--gres=gpu:1"])
    assert process.communicate(timeout=90)[1] == ""
    assert reports_of(tmp_path)[0].startswith("started 1: process 1 runs on n")
    process = outside(slurm, tmp_path, command, ["--gres=gpu:2"])
    _, err = process.communicate(timeout=90)
    assert (process.returncode, err.count("\n")) == (1, 1)
    assert err.startswith("RunError: rank 0 ended with status 1: ")
    assert "Requested node configuration is not available" in err, "Slurm's own words"


@needs_slurm
def test_newcomer_refused_by_slurm_does_not_stop_the_run(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    """The run is in an allocation and continues."""
    command = launcher(tmp_path, "manager.start(1)\nreports(1)\nprint('goes on')")
    env = {**PATHS, "JOB_OPTIONS": '["--partition=none"]'}
    slurm.submit(command, 1, "refused", tmp_path / "out", env, [f"--chdir={tmp_path}"])
    slurm.wait_for_state("refused", None)
    assert (tmp_path / "out").read_text() == "goes on\n"
    (line,) = reports_of(tmp_path)
    assert line.startswith("failed 1: process 1 did not join: it ended with status 1: ")
    assert "invalid partition specified: none" in line


@needs_slurm
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["asked", "killed"])
def test_ranks_end_with_their_launcher(slurm: SlurmCluster, tmp_path: Path, number: int) -> None:
    process = outside(slurm, tmp_path, launcher(tmp_path, *[STOPS_WHEN_ASKED] * 2))
    ended = check_that_ranks_end_with(process, tmp_path, number)
    if number == signal.SIGINT:
        assert ended == (130, "")
    wait_until(lambda: not slurm.states(), 60)


@needs_slurm
def test_failed_rank_is_reported(slurm: SlurmCluster, tmp_path: Path) -> None:
    """The launcher prints the error of the rank.

    If the rank reported no error, the launcher prints its exit status and its log file.
    """
    for body, line in (
        ("raise RunError('no luck')", "RunError: no luck"),
        ("sys.exit(3)", f"RunError: rank 1 ended with status 3; see {tmp_path}/rank-1.log"),
        ("os.kill(os.getpid(), 9)", "RunError: rank 1 was ended by SIGKILL"),
    ):
        process = outside(slurm, tmp_path, launcher(tmp_path, "heard('never')", body))
        _, err = process.communicate(timeout=90)
        assert (process.returncode, err.count("\n")) == (1, 1)
        assert err.startswith(line)
        wait_until(lambda: not slurm.states(), 60)


def test_missing_slurm_gives_a_one_line_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"cannot run scontrol show: Slurm is not installed.*; leave out"
    ):
        SlurmStarter(tmp_path)


def test_unreachable_controller_gives_a_one_line_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("srun", "scancel", "scontrol"):
        (tmp_path / name).write_text("#!/bin/sh\necho 'no\n configuration' >&2\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(ConfigError, match=r"no configuration; leave out"):
        SlurmStarter(tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    with pytest.raises(ConfigError, match=r"job 5: .*: no configuration; leave out"):
        SlurmStarter(tmp_path)


def test_the_launchers_node_stays_outside_of_a_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A shell of ssh has no SLURMD_NODENAME, and its host a longer name than the node."""
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    monkeypatch.setattr("socket.gethostname", lambda: "n1.cluster.example")
    monkeypatch.setattr("dynmo.elastic.managers.slurm._run", lambda *_, **_options: "n1 n2")
    ended = [SlurmProcess.__new__(SlurmProcess) for _ in range(2)]
    for process, node in zip(ended, ("n1", "n2"), strict=True):
        process.place, process.returncode = (node, 0, 1), 0
    starter = SlurmStarter(tmp_path)
    with pytest.raises(RunError, match=r"^n1 cannot be given back while the launcher runs there$"):
        starter.give_back(ended[:1])
    told = "job 5 gave back n2; n1 cannot be given back while the launcher runs there"
    assert starter.give_back(ended) == told


def test_separate_job_drops_variables_of_the_allocation() -> None:
    kept = {"SLURM_CONF": "/etc/slurm.conf", "PATH": "/bin"}
    devices = {"CUDA_VISIBLE_DEVICES": "1"}
    inside = {"SLURM_JOB_ID": "5", "SLURM_NTASKS": "4", "SLURMD_NODENAME": "n1"}
    assert own_job_environment(kept | devices | inside) == kept
    assert own_job_environment(kept | devices) == kept | devices, "they are the user's"


def test_lines_of_srun_are_not_passed_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The rank's own lines are, and unfinished ones at once."""
    srun = tmp_path / "srun"
    srun.write_text(
        "#!/bin/sh\nprintf 'srun: error: no\\nsrun: a note\\nstep 1\\rstep 2\\n' >&2\n"
        "printf 'slurmstepd-n1: error: 2\\nsrun: error: n1: task 0: Killed\\nlast' >&2\nexit 137\n"
    )
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    log = tmp_path / "rank-1.log"
    rank = RankCommand(1, ["rank"], {}, log, tmp_path / "entered-1")
    with SlurmProcess(rank, [], dict(os.environ), None) as process:
        assert process.wait(20) == 137
        assert process.poll() == -9
        assert process.reason() == "no; 2"
    assert log.read_bytes() == b"step 1\rstep 2\nlast"
