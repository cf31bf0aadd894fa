"""Runs of `dynmo train` whose ranks leave and join, or fail to."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dynmo.config import load
from tests.cli.runs import Run, assert_refused, end, events, free_port, steps, train
from tests.pool import Pool
from tests.processes import wait_until

ROOT = Path(__file__).parents[2]
PLAIN = ("balance.balancer=none", "checkpoint.every=0", "train.eval_every=0", "dynamism.cases=[]")


# The first process of a run is on a machine of its own, which is the first to be given back.
FIRST_APART = """
import os
import dynmo

class Apart(dynmo.Dynamism):
    name = "apart"

    def __init__(self):
        first = os.environ["DYNMO_PROCESS"] == "0"
        os.environ["SLURMD_NODENAME"] = "first" if first else "other"

    def act(self, step, layers):
        return None
"""


def sets(shapes: str, *more: str, ranks: int = 2, steps: int = 40) -> tuple[str, ...]:
    size = (f"parallel.pipeline={ranks}", f"train.steps={steps}")
    return (*PLAIN, *size, f"elastic.reshape_at={shapes}", *more)


def of_kind(folder: Path, name: str, kind: str) -> list[dict[str, Any]]:
    return [event for event in events(folder, name) if event["event"] == kind]


def digest(folder: Path, name: str) -> str:
    return of_kind(folder, name, "end")[-1]["weights_digest"]


def alone(pool: Pool, folder: Path, steps: int) -> str:
    """The digest of the same training on one rank."""
    given = [*sets("[]", ranks=1, steps=steps), f"data.source=file:{folder / 'text'}"]
    config = load(folder / "run.toml", given).model_dump(exclude_none=True)
    return pool.run("train", 1, config=config)[0]["digest"]


@pytest.mark.matrix
def test_processes_leave_and_others_join(work: Path, pool: Pool) -> None:
    """The launcher starts the new process. The digest is that of one rank."""
    done = end(train(work, name="resized", sets=sets("[[2, 1, 1], [4, 2, 1]]", steps=8)))
    assert done.status == 0, done.err
    (repack,), (grow,) = of_kind(work, "resized", "repack"), of_kind(work, "resized", "grow")
    assert (repack["ranks_before"], repack["ranks_after"], grow["ranks_after"]) == (2, 1, 2)
    assert repack["left"] != grow["joined"]
    pid = int(repack["left"][0].rpartition(":")[2])
    assert not Path(f"/proc/{pid}").exists()
    assert {event["by"] for event in of_kind(work, "resized", "release")} == {"launcher"}
    assert "went on with 1 of 2 ranks" in done.out
    assert "GPU-seconds" in done.out
    assert digest(work, "resized") == alone(pool, work, 8)


@pytest.mark.matrix
def test_first_process_leaves_and_the_record_goes_on(work: Path, pool: Pool) -> None:
    """A newcomer becomes rank 0. The terminal shows it, and its last lines are those of the run."""
    (work / "apart.py").write_text(FIRST_APART)
    case = ("dynamism.cases=['python:apart:Apart']", "metrics.to=['csv']", "checkpoint.every=4")
    case = (*case, "train.eval_every=2", "checkpoint.keep_best=true", "checkpoint.keep=9")
    shapes = sets("[[2, 3, 1], [5, 2, 1], [6, 3, 1]]", *case, ranks=1, steps=8)
    env = {"PYTHONPATH": str(ROOT)}
    done = end(train(work, "--json", name="left", sets=shapes, env=env))
    assert done.status == 0, done.err
    said = json.loads(done.out)
    assert (said["name"], said["steps"], said["left"]) == ("left", 8, False)
    assert said["weights_digest"] == digest(work, "left") == alone(pool, work, 8)
    (repack,), grows = of_kind(work, "left", "repack"), of_kind(work, "left", "grow")
    assert [len(grow["joined"]) for grow in grows] == [2, 1]
    assert repack["left"][0].startswith("first:")
    assert "rank 0 has left after step 5" in done.err
    assert done.err.index("went on with 2 of 3 ranks") < done.err.index("left 8/8")
    rows = (work / "runs/left/numbers.csv").read_text().splitlines()[1:]
    assert [row.partition(",")[0] for row in rows] == [str(step) for step in range(8)]
    assert len(of_kind(work, "left", "step")) == 8
    report = subprocess.run(
        [sys.executable, "-m", "dynmo", "report", "runs/left"],
        cwd=work,
        env=os.environ | env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "went on with 2 of 3 ranks" in report.stdout
    end_of_run = of_kind(work, "left", "end")[0]
    assert end_of_run["gpu_seconds_returned"] > 0
    manifest = json.loads((work / "runs/left/checkpoints/step-000008/manifest.json").read_text())
    losses = [event["loss"] for event in of_kind(work, "left", "eval")]
    assert f'"loss": {min(losses)}' in json.dumps(manifest)
    shutil.rmtree(work / "runs/left/checkpoints/step-000008")
    again = end(train(work, "--resume", name="left", sets=shapes, env=env))
    assert again.status == 0, again.err
    assert f"done: loss {said['loss']:.6f}, weights {said['weights_digest'][:16]}" in again.out


@pytest.mark.matrix
def test_rank_started_by_hand_joins_the_run(work: Path) -> None:
    """All pods of a job run one command. The third joins, and is stopped while it waits."""
    names = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    names |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    parks = ("elastic.park=true", "elastic.join_timeout=25")
    given = sets("[[20, 3, 1], [40, 2, 1]]", *parks, steps=2000)
    ranks = [
        train(work, "--join", sets=given, env={**names, "RANK": str(rank)}) for rank in range(2)
    ]
    wait_until(lambda: (work / "runs/main/rendezvous.json").is_file(), 30)
    third = train(work, "--join", sets=given, env={**names, "RANK": "2"})
    wait_until(lambda: bool(of_kind(work, "main", "repack")), 40)
    (grow,) = of_kind(work, "main", "grow")
    assert (grow["ranks_before"], grow["ranks_after"]) == (2, 3)
    parked = of_kind(work, "main", "repack")[0]["left"][0]
    assert parked == grow["joined"][0], "it joined, and is parked"
    third.send_signal(signal.SIGTERM)
    assert end(third).status == 0
    before = steps(work, "main")
    wait_until(lambda: steps(work, "main") > before + 5)
    ranks[0].send_signal(signal.SIGTERM)
    assert [end(rank).status for rank in ranks] == [130, 130]
    assert not (work / "runs/main/rendezvous.json").exists()


@pytest.mark.matrix
def test_run_resumes_after_a_rank_dies_during_a_move(work: Path, pool: Pool) -> None:
    """The error is one line. The run resumes on fewer ranks from its checkpoint."""
    case = ("dynamism.cases=['python:tests.cases.dying:Dying']", "checkpoint.every=4")
    given = sets("[[6, 1, 1]]", *case, steps=12)
    env = {"PYTHONPATH": str(ROOT)}
    done = end(train(work, name="killed", sets=given, env={**env, "DIES": "1"}))
    assert done.status == 1
    assert "rank 1 was ended by SIGKILL" in done.line
    assert steps(work, "killed") == 6
    resumed = end(train(work, "--resume", name="killed", sets=given, env=env))
    assert resumed.status == 0, resumed.err
    assert digest(work, "killed") == alone(pool, work, 12)


@pytest.mark.matrix
def test_failed_release_command_does_not_stop_the_run(work: Path) -> None:
    """The log contains the output of the command."""
    hook = [sys.executable, "-c", "print('no such node'); raise SystemExit(3)"]
    command = ("elastic.releaser=command", f"elastic.release_command={json.dumps(hook)}")
    # Long enough for the hook to end.
    given = sets("[[5, 1, 1]]", *command, "model.f=0.005", steps=30)
    done = end(train(work, name="hooked", sets=given))
    assert done.status == 0, done.err
    (fault,) = of_kind(work, "hooked", "fault")
    assert "elastic.release_command" in fault["what"]
    assert "no such node" in fault["what"]
    assert of_kind(work, "hooked", "end")[0]["reason"] == "done"


@pytest.mark.parametrize(
    ("flags", "key", "more", "says"),
    [
        ([], "repack=true", "elastic.min_ranks=3", "elastic.min_ranks = 3"),
        ([], "releaser=command", "elastic.release_command=['no-such']", "'no-such'"),
        (["--dry-run"], "target_ranks=1", "pipeline.memory_limit=3500", "elastic.target_ranks = 1"),
    ],
)
def test_wrong_options_start_no_rank(
    filled: Path, run: Run, flags: list[str], key: str, more: str, says: str
) -> None:
    given = (*PLAIN, "parallel.pipeline=2", f"elastic.{key}", more)
    assert_refused(run(filled, "run.toml", *flags, sets=given), says)
    assert not (filled / "runs").exists()
