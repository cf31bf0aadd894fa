"""`dynmo train` processes that fail, stop and resume, also under other launchers."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dynmo.config import load
from dynmo.event_log import read
from dynmo.report.summary import summarize
from tests.cli.conftest import ENDS
from tests.cli.runs import (
    CONFIG,
    GPT,
    LONG,
    ONE_RANK,
    Base,
    Done,
    Run,
    assert_refused,
    end,
    events,
    free_port,
    steps,
    train,
    tree,
)
from tests.pool import Pool
from tests.processes import catches, ranks, start, wait_until

# A torch whose import does not end.
SLOW_TORCH = """
import os, signal
from pathlib import Path

Path(f"imports-{os.environ['RANK']}").touch()
signal.pause()
"""
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def of(function: str) -> tuple[str, str]:
    return f"model.kind=python:models:{function}", "dynamism.cases=[]"


def test_interrupted_run_says_how_to_go_on(base: Base) -> None:
    assert base.asked.status == 130
    assert "Traceback" not in base.asked.err
    assert "Measured, phase by phase" in base.asked.out
    assert "interrupted: loss" in base.asked.out
    at = next(i for i, event in enumerate(base.events) if event["event"] == "end")
    checkpoint, last = base.events[at - 1 : at + 1]
    saved = f"runs/main/checkpoints/step-{last['step']:06d}"
    assert base.asked.line == f"dynmo: interrupted; --resume goes on from {saved}"
    assert last["reason"] == "interrupted"
    assert (checkpoint["event"], checkpoint["path"]) == ("checkpoint", saved)


def test_killed_rank_is_reported(base: Base) -> None:
    """No process is left, and the log has no end."""
    assert (base.killed.status, base.killed.out) == (1, "")
    assert "rank 1 was ended by SIGKILL" in base.killed.line
    assert "--resume goes on from runs/main/checkpoints/step-0000" in base.killed.line
    assert base.left
    ends = [event["reason"] for event in base.events if event["event"] == "end"]
    assert ends == ["interrupted", "done"]


def test_stopped_and_killed_run_ends_with_equal_weights(base: Base, pool: Pool) -> None:
    """The weights are those of a run of one rank that was never interrupted."""
    text = f"data.source=file:{base.folder / 'text'}"
    sets = [text, ONE_RANK, "dynamism.cases=['freezing']", *(f"model.{x}=0" for x in "fbw")]
    config = load(base.folder / "run.toml", sets).model_dump(exclude_none=True)
    expected = pool.run("train", 1, config=config)[0]
    result = json.loads(base.done.out)
    assert (result["weights_digest"], result["loss"]) == (expected["digest"], expected["loss"])


@pytest.mark.matrix
def test_ctrl_c_ends_a_run_after_a_step(work: Path) -> None:
    process = train(work, sets=LONG)
    wait_until(lambda: steps(work, "main") >= 1, 120)
    os.killpg(process.pid, signal.SIGINT)
    done = end(process)
    assert done.status == 130
    assert "interrupted: loss" in done.out
    assert events(work, "main")[-1]["reason"] == "interrupted"


# -- failures --------------------------------------------------------------------------------------


@pytest.mark.matrix
def test_exception_on_a_rank_is_reported(work: Path, run: Run) -> None:
    """The message gives the cause, not the failure that follows on the other rank."""
    sets = (*of("tires"), "checkpoint.every=0")
    done = end(train(work, "--json", sets=sets))
    assert (done.status, done.out) == (1, "")
    cause = "rank 1: ArithmeticError: tired of this (models.py:13), in F of layer 2"
    assert cause in done.line
    assert "runs/main/rank-1.log" in done.line
    assert 'models.py", line 13, in forward' in (work / "runs/main/rank-1.log").read_text()
    assert steps(work, "main") == 2
    assert_refused(run(work, "run.toml"), "runs/main exists")


def test_non_finite_loss_ends_the_run(filled: Path, rank: Run, dynmo: Callable[..., Done]) -> None:
    """Two steps are skipped, and the third ends it, after a checkpoint.

    The run also warns once that its ranks have too few cores.
    """
    sets = (*GPT, ONE_RANK, "train.lr=1e30", "train.max_grad_norm=0", "train.stop_after=3")
    sets = (*sets, f"parallel.threads={CORES + 1}", "checkpoint.every=auto")
    done = rank(filled, "run.toml", sets=sets)
    assert (done.status, done.out) == (1, "")
    warning, line = (line for line in done.err.splitlines() if line.startswith("dynmo:"))
    assert f"{CORES + 1} threads on {CORES} cores" in warning
    said = re.search(
        r"step (\d+): loss \S+, gradient norm (nan|inf), as in 3 steps in a row "
        r"\(train\.stop_after\);.* learning rate",
        line,
    )
    assert said is not None
    last = int(said[1])
    for row, step in enumerate((last - 2, last - 1), 1):
        assert re.search(rf"^step {step}: skipped: .* \({row} in a row; 3 end", done.err, re.M)
    assert re.search(r"  skipped 1$", done.err, re.M), "the progress"
    assert [each.name for each in (filled / "runs/main/checkpoints").glob("step-*")] == [
        f"step-{last:06d}"
    ]
    assert ", 2 of them skipped, " in dynmo("report", str(filled / "runs/main")).out
    assert "Traceback" not in done.err


@pytest.mark.matrix
def test_hanging_rank_is_reported_after_the_timeout(work: Path) -> None:
    process = train(work, sets=(*LONG, "parallel.timeout=2"))
    wait_until(lambda: steps(work, "main") >= 1)
    os.kill(ranks(work)[1], signal.SIGSTOP)
    done = end(process, 15)
    assert (done.status, done.out) == (1, "")
    assert "rank 0 waited 2 s for rank 1" in done.line


def test_interrupt_during_start_leaves_no_run(work: Path) -> None:
    (work / "slow").mkdir()
    (work / "slow/torch.py").write_text(SLOW_TORCH)
    path = os.pathsep.join([str(work / "slow"), str(Path(__file__).parents[2])])
    process = train(work, env={"PYTHONPATH": path})
    wait_until(lambda: all((work / f"imports-{rank}").exists() for rank in range(2)), 120)
    os.killpg(process.pid, signal.SIGINT)
    told = "interrupted before the first step, so there is nothing to save"
    assert end(process) == (130, "", f"dynmo: {told}\n")
    assert not list((work / "runs").iterdir())


# -- worlds that others start ----------------------------------------------------------------------


@pytest.mark.matrix
def test_torchrun_starts_a_run(base: Base, work: Path) -> None:
    """The ranks meet in a file and at 127.0.0.1. No port is open to the network."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=store", "--rdzv-conf=store_type=file"]
    command += ["--rdzv-id=test", "--local-addr=127.0.0.1"]
    command += ["-m", "dynmo", "train", "run.toml", "--json"]
    env = {"PYTHONWARNINGS": "", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = end(start(command, work, env))
    assert done.status == 0, done.err
    assert json.loads(done.out)["weights_digest"] == json.loads(base.done.out)["weights_digest"]
    assert set(tree(work / "runs/main")) >= {"config.toml", "events.jsonl", "trace.json"}


def test_world_size_other_than_the_config_is_refused(filled: Path, rank: Run) -> None:
    os.environ["WORLD_SIZE"] = "3"
    assert_refused(rank(filled, "run.toml"), "3 ranks", "parallel.pipeline x replicas = 2")
    assert not (filled / "runs").exists()


def test_rank_of_another_launcher_reports_its_own_error(filled: Path, rank: Run) -> None:
    """Another launcher does not report the cause. `--overwrite` replaces the old run."""
    run = filled / "runs/main"
    run.mkdir(parents=True)
    (run / "config.toml").write_text("")
    (run / "old").write_text("of an earlier run")
    done = rank(filled, "run.toml", "--overwrite", sets=(*of("tires"), ONE_RANK))
    assert (done.status, done.out.count("\n")) == (1, 1)
    cause = "rank 0: ArithmeticError: tired of this (models.py:13), in F of layer 2"
    assert cause in done.line
    assert set(tree(run)) == {"config.toml", "events.jsonl"}
    # Wrong input leaves what was there.
    before, raises = tree(filled), (*of("raises"), ONE_RANK)
    done = rank(filled, "run.toml", "--overwrite", sets=raises)
    assert (done.status, done.err.count("\n")) == (2, 1)
    assert tree(filled) == before
    assert [path.name for path in (filled / "runs").iterdir()] == ["main"]
    rank(filled, "run.toml", sets=("name=new", *raises))
    assert not (filled / "runs/new").exists()


def test_truncated_text_file_ends_the_run_with_a_reason(filled: Path, rank: Run) -> None:
    """A layer cuts the file in the second step. The rank is not ended by SIGBUS."""
    done = rank(filled, "run.toml", sets=(*of("cuts"), "checkpoint.every=0", ONE_RANK))
    assert (done.status, done.out) == (1, "")
    assert 'data.source = "file:text"' in done.line
    assert "19000 bytes" in done.line


@pytest.mark.matrix
def test_crash_leaves_the_stack_in_the_rank_log(work: Path) -> None:
    done = end(train(work, sets=(*of("crashes"), ONE_RANK)))
    assert_refused(done, "was ended by SIGSEGV", status=1)
    log = re.search(r"\S+/rank-\d.log", done.line)
    assert log is not None
    assert "in crashes" in (work / log[0]).read_text()


def refused(pool: Pool, folder: Path, *sets: tuple[str, ...]) -> list[Done]:
    """How `dynmo train` ends on ranks that another launcher started with these values."""
    lines = [
        ["train", "run.toml", *(word for text in given for word in ("--set", text))]
        for given in sets
    ]
    given = {"lines": lines, "folder": str(folder), "port": free_port()}
    ended = [Done(*each) for each in pool.run("command", len(sets), **given)]
    assert not list((folder / "runs").iterdir())
    return ended


def test_model_that_differs_by_rank_is_refused(pool: Pool, filled: Path) -> None:
    """The error names the first different layer before ranks exchange other messages."""
    for done in refused(pool, filled, of("longer"), of("longer")):
        assert_refused(done, "layer 2", "rank 0 and rank 1")


def test_configs_that_differ_by_rank_are_refused(pool: Pool, filled: Path) -> None:
    """Every rank reports its own value. `parallel.timeout` may differ."""
    sets = [("train.lr=0.5", "parallel.timeout=20"), ("train.lr=0.25", "parallel.timeout=30")]
    for rank, done in enumerate(refused(pool, filled, *sets)):
        mine = f"train.{sets[rank][0][6:].replace('=', ' = ')} on rank {rank}"
        assert_refused(done, "rank 0 and rank 1", mine)


def test_silent_listener_on_the_port_times_out(filled: Path, rank: Run) -> None:
    """Another program listens on MASTER_PORT and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        os.environ |= {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": port}
        done = rank(filled, "run.toml", sets=("parallel.timeout=1.0",))
    assert_refused(done, "rank 1 waited 1 s", "rank 0 at 127.0.0.1:", status=1)
    assert not (filled / "runs").exists()


@pytest.mark.matrix
def test_signal_to_one_slurm_task_stops_all_tasks(work: Path) -> None:
    """One of two tasks gets the signal. Both stop after the same step."""
    job = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "localhost"}
    job["MASTER_PORT"] = free_port()
    ids = [{"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)} for i in range(2)]
    tasks = [train(work, "--json", sets=LONG, env=job | each) for each in ids]
    wait_until(lambda: steps(work, "main") >= 3)
    tasks[1].send_signal(signal.SIGINT)
    first, second = end(tasks[0]), end(tasks[1])
    assert (first.status, second.status) == (130, 130)
    assert (second.out, second.err) == ("", "")
    result = json.loads(first.out)
    assert (result["interrupted"], result["steps"]) == (True, steps(work, "main"))
    assert events(work, "main")[-1]["reason"] == "interrupted"


# -- restarts --------------------------------------------------------------------------------------

KILLS = ENDS.replace("os.kill(", "left = name.rename(f'done {name}'); os.kill(").replace(
    "name.read_text()", "left.read_text()"
)


@pytest.mark.matrix
def test_restarted_run_ends_with_equal_weights(base: Base, work: Path) -> None:
    """Three ranks die: before the first checkpoint, and after the second and the third one."""
    text = (base.folder / "run.toml").read_text().replace("ends:Ends", "kills:Ends")
    (work / "run.toml").write_text(text)
    (work / "kills.py").write_text(KILLS)
    for place in ("step 3 of rank 1", "step 12 of rank 0", "step 18 of rank 1"):
        (work / place).write_text("SIGKILL")
    done = end(train(work, "--json", "--restarts", "3"), 120)
    assert done.status == 0, done.err
    told = [line for line in done.err.splitlines() if line.startswith("dynmo:")]
    ends = ("begins anew", *["goes on from runs/main/checkpoints/step-0000(05|10|15)"] * 2)
    for number, (line, how) in enumerate(zip(told, ends, strict=True), start=1):
        killed = r"dynmo: after \d+ steps: rank \d was ended by SIGKILL.*; restart"
        assert re.fullmatch(f"{killed} {number} of 3 {how}", line)
    result = json.loads(done.out)
    assert result["weights_digest"] == json.loads(base.done.out)["weights_digest"]
    assert summarize(read(work / "runs/main/events.jsonl")).steps == 40


def test_run_that_torchrun_restarts_goes_on(filled: Path, rank: Run) -> None:
    """It resumes or begins anew by itself. A run of another job is not touched."""
    sets = (*of("tires"), ONE_RANK, "train.steps=3", "checkpoint.every=1", "train.eval_every=0")

    def attempt(number: int, *arguments: str, job: str = "job") -> Done:
        os.environ |= {"MASTER_PORT": free_port(), "TORCHELASTIC_RUN_ID": job}
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
        return rank(filled, "run.toml", *arguments, sets=sets)

    assert "tired of this" in attempt(0).err
    (filled / "run.toml").write_text(CONFIG)
    done = attempt(1, "--overwrite")
    assert done.status == 0, done.err
    assert re.search(r"started again; runs/main goes on from .*/step-00000[12]\n", done.err)
    for number in range(2):
        assert_refused(attempt(number, job="other"), "runs/main exists")
    shutil.rmtree(filled / "runs/main/checkpoints")
    assert_refused(attempt(1), "runs/main exists")


def test_run_that_a_job_starts_again_goes_on(filled: Path, rank: Run) -> None:
    sets = (*of("tires"), ONE_RANK, "train.steps=3", "checkpoint.every=1", "train.eval_every=0")
    os.environ |= {"MASTER_PORT": free_port(), "DYNMO_JOB": "uid"}
    assert "tired of this" in rank(filled, "run.toml", sets=sets).err
    (filled / "run.toml").write_text(CONFIG)
    os.environ |= {"MASTER_PORT": free_port(), "DYNMO_JOB": "another"}
    assert_refused(rank(filled, "run.toml", sets=sets), "runs/main exists")
    os.environ |= {"MASTER_PORT": free_port(), "DYNMO_JOB": "uid"}
    done = rank(filled, "run.toml", sets=sets)
    assert done.status == 0, done.err
    assert re.search(r"started again; runs/main goes on from", done.err)


REMOVES = """
import shutil
from torch import nn

class Removes(nn.Linear):
    calls = 0
    def forward(self, x):
        self.calls += 1
        if self.calls == 10:
            shutil.move("runs/main", "elsewhere")
        return super().forward(x)

def model(kind):
    return [nn.Embedding(256, 8), kind(8, 8), nn.Linear(8, 256)]

def plain():
    return model(nn.Linear)

def removes():
    return model(Removes)
"""


def test_run_whose_folder_is_moved_goes_on(filled: Path, rank: Run) -> None:
    (filled / "removes.py").write_text(REMOVES)
    sets = ("dynamism.cases=[]", ONE_RANK, "train.steps=6", "checkpoint.every=50")
    sets += ("train.eval_every=0", "metrics.to=['csv']", "model.kind=python:removes:")
    digests: list[str] = []
    for name, function in (("plain", "plain"), ("main", "removes")):
        os.environ["MASTER_PORT"] = free_port()
        given = (*sets[:-1], sets[-1] + function, f"name={name}")
        done = rank(filled, "run.toml", "--json", sets=given)
        assert done.status == 0, done.err
        digests.append(json.loads(done.out)["weights_digest"])
    assert digests[0] == digests[1]
    assert "dynmo: runs/main was removed or moved while the run trains" in done.err
    assert load(filled / "runs/main/config.toml").name == "main"
    kinds = [(each["event"], each["step"]) for each in events(filled, "main")]
    assert {step for kind, step in kinds if kind == "step"} == {2, 3, 4, 5}
    saved = [step for kind, step in kinds if kind == "checkpoint"]
    assert len(saved) == 2, "soon, and at the end"
    assert (filled / "runs/main/numbers.csv").exists()
    assert (filled / "elsewhere/config.toml").exists()


@pytest.mark.matrix
def test_fault_that_comes_again_ends_the_run(work: Path) -> None:
    sets = (*of("tires"), "checkpoint.every=0")
    done = end(train(work, "--restarts", "5", sets=sets), 120)
    assert done.status == 1
    first, last = (line for line in done.err.splitlines() if line.startswith("dynmo:"))
    assert "after 2 steps" in first
    assert "restart 1 of 5 begins anew" in first
    assert "came twice after 2 steps" in last
    assert "tired of this" in last


@pytest.mark.matrix
def test_signal_to_the_launcher_saves(work: Path) -> None:
    process = train(work, sets=(*LONG, "checkpoint.every=100000"))
    process.send_signal(signal.SIGUSR1) if catches(process, signal.SIGUSR1) else None
    wait_until(lambda: steps(work, "main") >= 1, 120)
    process.send_signal(signal.SIGUSR1)
    wait_until(lambda: any((work / "runs/main/checkpoints").glob("step-*[0-9]")))
    process.send_signal(signal.SIGTERM)
    done = end(process)
    assert done.status == 130
    saved = [e["step"] for e in events(work, "main") if e["event"] == "checkpoint"]
    assert len(saved) == 2
