"""Training on ranks that leave and come back, or die, under a real Slurm and a real Ray.

Another job uses the ranks that a run releases. Then the run uses them again.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dynmo.change_events import GrowEvent, RecoverEvent, ReleaseEvent, RepackEvent
from dynmo.config import parse
from dynmo.event_log import read
from dynmo.events import EndEvent, Event, StepResult
from tests.elastic.ray_cluster import ray_cluster, why_no_ray
from tests.elastic.slurm import slurm_cluster, why_no_slurm
from tests.jobs import SOURCE
from tests.pool import Pool
from tests.processes import wait_until

pytestmark = pytest.mark.clusters

ROOT = Path(__file__).parents[2]
NO_SLURM, NO_RAY = why_no_slurm(), why_no_ray()
PATHS = {"PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1"}

# Layers that sleep: the ranks share two cores.
RUN: dict[str, Any] = {
    "name": "run",
    "model": {"kind": "emulated", "layers": 8, "f": 0.002, "b": 0.002, "w": 0.002},
    "train": {"steps": 40, "global_batch": 4, "micro_batch": 1},
    "parallel": {"pipeline": 4, "timeout": 60.0},
    "data": {"source": SOURCE},
    "balance": {"balancer": "none"},
    "elastic": {"reshape_at": [[8, 2, 1], [16, 4, 1]], "join_timeout": 45.0},
}


# A run whose rank is killed. Its steps take long enough for that.
KILLED = RUN | {
    "model": {**RUN["model"], "f": 0.006, "b": 0.006, "w": 0.006},
    "train": {"steps": 30, "global_batch": 6, "micro_batch": 1},
    "parallel": {"pipeline": 3, "timeout": 10.0},
    "elastic": {},
    "checkpoint": {"every": 5},
    "launch": {"restarts": 2},
}


# The same, and the other ranks go on.
SURVIVES = KILLED | {"elastic": {"recover": "memory"}, "launch": {}}


def command(folder: Path, launcher: str, run: dict[str, Any] = RUN) -> list[str]:
    (folder / "run.toml").write_text(parse(run).to_toml())
    return [sys.executable, "-m", "dynmo", "train", "run.toml", "--launcher", launcher]


def rank_of(folder: Path, number: int, variable: str = "DYNMO_PROCESS") -> int:
    """Returns the process of a rank once a checkpoint is there."""
    wait_until(lambda: any(folder.glob("runs/run/checkpoints/step-*[0-9]")), 60)
    (process,) = (
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/environ")
        if _has(path, f"{variable}={number}", folder)
    )
    return process


def _has(environ: Path, variable: str, folder: Path) -> bool:
    try:
        text, line = environ.read_text(), environ.with_name("cmdline").read_text()
        is_here = environ.with_name("cwd").readlink() == folder
    except (OSError, UnicodeDecodeError):  # ended, or not ours
        return False
    return is_here and variable in text.split("\0") and "srun" not in line


def check_restarted(folder: Path, pool: Pool, ranks: int) -> None:
    """Checks that the run has ended with the weights of one that nobody disturbed."""
    events = list(read(folder / "runs/run/events.jsonl"))
    check_end(events, pool)
    steps = [e for e in events if isinstance(e, StepResult)]
    assert (len(steps[0].memory), len(steps[-1].memory)) == (3, ranks)


def check_end(events: Sequence[Event], pool: Pool) -> None:
    (end,) = [e for e in events if isinstance(e, EndEvent)]
    assert end.reason == "done"
    alone = {"parallel": {}, "launch": {}, "checkpoint": {"every": 0}}
    alone["model"] = {**KILLED["model"], "f": 0, "b": 0, "w": 0}
    assert end.weights_digest == pool.run("train", 1, config=KILLED | alone)[0]["digest"]


def check_survived(folder: Path, pool: Pool) -> None:
    """Checks that the ranks that were left have gone on."""
    events = list(read(folder / "runs/run/events.jsonl"))
    (recover,) = [e for e in events if isinstance(e, RecoverEvent)]
    assert (recover.ranks_before, recover.ranks_after) == (3, 2)
    check_end(events, pool)


def check(folder: Path, pool: Pool) -> list[ReleaseEvent]:
    """Checks a run that has shrunk and grown, in processes that are gone and new.

    The run ends with the weights of a run that did not. Returns what its launcher has told.
    """
    events = list(read(folder / "runs/run/events.jsonl"))
    (repack,) = [e for e in events if isinstance(e, RepackEvent)]
    (grow,) = [e for e in events if isinstance(e, GrowEvent)]
    assert (repack.step, repack.ranks_before, repack.ranks_after) == (8, 4, 2)
    assert (grow.ranks_before, grow.ranks_after) == (2, 4)
    assert grow.step >= 16
    assert len(repack.left) == len(grow.joined) == 2
    assert not {*repack.left} & {*grow.joined}
    (end,) = [e for e in events if isinstance(e, EndEvent)]
    assert end.reason == "done"
    assert end.gpu_seconds_returned > 0
    steps = [e for e in events if isinstance(e, StepResult)]
    returned = [e.gpu_seconds_returned for e in steps]
    assert returned == sorted(returned)
    assert returned[0] == 0 < returned[-1] <= end.gpu_seconds_returned
    assert {len(e.memory) for e in steps if e.step in (repack.step - 1, repack.step)} == {2, 4}
    still = RUN | {"parallel": {}, "elastic": {}, "model": {**RUN["model"], "f": 0, "b": 0, "w": 0}}
    assert end.weights_digest == pool.run("train", 1, config=still)[0]["digest"]
    return [e for e in events if isinstance(e, ReleaseEvent)]


@pytest.mark.skipif(NO_SLURM is not None, reason=str(NO_SLURM))
def test_slurm_run_releases_and_regains_ranks(tmp_path: Path, pool: Pool) -> None:
    with slurm_cluster() as slurm:
        options = [f"--chdir={tmp_path}"]
        job = slurm.submit(command(tmp_path, "slurm"), 4, "train", tmp_path / "out", PATHS, options)
        slurm.wait_for_state("train", "RUNNING")
        other = slurm.submit(["sleep", "1.5"], 2, "another", tmp_path / "out2", options=options)
        assert slurm.states()["another"] == "PENDING"
        try:
            slurm.wait_for_state("another", "RUNNING")
            assert slurm.states()["train"] == "RUNNING"
            assert slurm.nodes_of(other) == ["n3", "n4"]
            assert slurm.nodes_of(job) == ["n1", "n2"]
            slurm.wait_for_state("another", None)
            slurm.wait_for_state("train", None, 50)
        finally:
            print((tmp_path / "out").read_text())
        told = check(tmp_path, pool)
        assert told[0].what == f"job {job} gave back n3, n4"
        assert {event.what.rpartition(" ")[2] for event in told[1:]} == {"n3", "n4"}
        wait_until(lambda: not slurm.states())


@pytest.mark.skipif(NO_SLURM is not None, reason=str(NO_SLURM))
def test_slurm_run_goes_on_without_a_node(tmp_path: Path, pool: Pool) -> None:
    """A node of three goes down, with its rank."""
    with slurm_cluster(3) as slurm:
        options = [f"--chdir={tmp_path}", "--no-kill"]
        out, line = tmp_path / "out", command(tmp_path, "slurm", KILLED)
        slurm.submit(line, 3, "train", out, PATHS, options)
        try:
            process = rank_of(tmp_path, 2)
            slurm.run("scontrol", "update", "NodeName=n3", "State=DOWN", "Reason=test")
            with contextlib.suppress(ProcessLookupError):  # Slurm has ended it
                os.kill(process, signal.SIGKILL)
            slurm.wait_for_state("train", None, 90)
        finally:
            print(out.read_text())
        assert "restart 1 of 2 goes on from runs/run/checkpoints/step-" in out.read_text()
        assert " with 2 of 3 ranks (2 x 1)" in out.read_text()
        check_restarted(tmp_path, pool, ranks=2)


@pytest.mark.skipif(NO_SLURM is not None, reason=str(NO_SLURM))
@pytest.mark.parametrize(("by", "number"), [("dynmo", 0), ("srun", 1)])
def test_slurm_run_survives_a_dead_rank(tmp_path: Path, pool: Pool, by: str, number: int) -> None:
    """By srun, rank 0 has the store."""
    line, variable = command(tmp_path, "slurm", SURVIVES), "DYNMO_PROCESS"
    if by == "srun":
        srun = ["srun", "--ntasks=3", "--mpi=none", "--cpu-bind=none", "--kill-on-bad-exit=0"]
        line, variable = [*srun, *line[:-2]], "SLURM_PROCID"
    with slurm_cluster(3) as slurm:
        out, given = tmp_path / "out", PATHS | {"GLOO_SOCKET_IFNAME": "lo"}
        slurm.submit(line, 3, "train", out, given, [f"--chdir={tmp_path}"])
        try:
            os.kill(rank_of(tmp_path, number, variable), signal.SIGKILL)
            slurm.wait_for_state("train", None)
        finally:
            print(out.read_text())
        check_survived(tmp_path, pool)


# A second job of the cluster. It asks for two GPUs once none is free, holds them until the run is
# about to ask for others, and prints when it ended.
OTHER = """
import pathlib, sys, time, ray
ray.init(address="auto", log_to_driver=False)

@ray.remote(num_cpus=0, num_gpus=2)
def work(log):
    while '"step": 15,' not in pathlib.Path(log).read_text():
        time.sleep(0.05)
    return time.time()

while ray.available_resources().get("GPU", 0) > 0:
    time.sleep(0.05)
print(ray.get(work.remote(sys.argv[1])), flush=True)
"""


@pytest.mark.skipif(NO_RAY is not None, reason=str(NO_RAY))
def test_ray_run_releases_and_regains_ranks(tmp_path: Path, pool: Pool) -> None:
    with ray_cluster(gpus=4) as cluster:
        log = tmp_path / "runs/run/events.jsonl"
        other = cluster.start([sys.executable, "-c", OTHER, str(log)], tmp_path)
        run = cluster.start(command(tmp_path, "ray"), tmp_path, PATHS)
        out, _ = other.communicate(timeout=80)
        ended = float(out.split()[-1])
        assert run.wait(50) == 0, run.communicate()
        told = check(tmp_path, pool)
        assert told[0].ranks == 2
        events = [json.loads(line) for line in log.read_text().splitlines()]
        times = {event["event"]: event["time"] for event in events}
        assert times["repack"] < ended < times["grow"], "it ran on what the run gave back"
        assert time.time() > ended


@pytest.mark.skipif(NO_RAY is not None, reason=str(NO_RAY))
def test_ray_run_starts_again(tmp_path: Path, pool: Pool) -> None:
    with ray_cluster(gpus=3) as cluster:
        run = cluster.start(command(tmp_path, "ray", KILLED), tmp_path, PATHS)
        os.kill(rank_of(tmp_path, 2), signal.SIGKILL)
        _, said = run.communicate(timeout=90)
        assert run.returncode == 0, said
        assert "restart 1 of 2 goes on from runs/run/checkpoints/step-" in said
        assert " ranks (" not in said
        check_restarted(tmp_path, pool, ranks=3)


@pytest.mark.skipif(NO_RAY is not None, reason=str(NO_RAY))
def test_ray_run_survives_a_dead_rank(tmp_path: Path, pool: Pool) -> None:
    with ray_cluster(gpus=3) as cluster:
        run = cluster.start(command(tmp_path, "ray", SURVIVES), tmp_path, PATHS)
        os.kill(rank_of(tmp_path, 0), signal.SIGKILL)
        _, said = run.communicate(timeout=90)
        assert run.returncode == 0, said
        check_survived(tmp_path, pool)
