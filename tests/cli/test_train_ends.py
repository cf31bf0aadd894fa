"""`dynmo train` as a process: how it fails, is stopped and goes on.

The tests also cover worlds that others start.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from tests.cli.runs import GPT, LONG, Base, Run, end, events, fill, free_port, steps, train, tree
from tests.processes import gone, ranks, start, wait_until

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def test_stopped_killed_and_resumed(base: Base, work: Path) -> None:
    """A run that is stopped twice has the same weights as in one go.

    It is stopped by Ctrl-C, then its launcher is killed, and then it ends. Once more, it is done.
    """
    process = train(work, name="cut")
    wait_until(lambda: steps(work, "cut") >= 8)
    os.killpg(process.pid, signal.SIGINT)
    done = end(process)
    assert done.status == 130
    assert "Traceback" not in done.err
    assert "Measured, phase by phase" in done.out
    assert "interrupted: loss" in done.out
    *_, saved, last = events(work, "cut")
    assert (last["event"], last["reason"], last["step"]) == (
        "end",
        "interrupted",
        steps(work, "cut"),
    )
    assert (saved["event"], saved["path"]) == (
        "checkpoint",
        f"runs/cut/checkpoints/step-{last['step']:06d}",
    )

    process = train(work, "--resume", name="cut")
    wait_until(lambda: steps(work, "cut") >= 23)
    process.kill()
    process.communicate()
    wait_until(lambda: gone(work), 5)
    for folder in (work / "tmp").glob("dynmo-*"):  # nobody was there to remove it
        shutil.rmtree(folder)
    assert events(work, "cut")[-1]["event"] != "end"

    done = end(train(work, "--resume", "--json", name="cut"))
    assert done.status == 0
    result, expected = json.loads(done.out), json.loads(base.done.out)
    assert (result["weights_digest"], result["loss"]) == (
        expected["weights_digest"],
        expected["loss"],
    )
    ids = [e["id"] for e in events(work, "cut") if e["event"] == "rebalance"]
    assert ids == sorted(ids)

    done = end(train(work, "--resume", name="cut"))
    assert (done.status, "done: loss" in done.out) == (0, True)
    assert events(work, "cut")[-1]["weights_digest"] == expected["weights_digest"]
    assert events(work, "cut")[-1]["loss"] == expected["loss"]


# -- failures --------------------------------------------------------------------------------------


def test_a_rank_that_raises(work: Path, run: Run) -> None:
    """The cause is told, not what followed from it on the other rank.

    The traceback is in the log of the rank. The next attempt must choose.
    """
    done = end(
        train(
            work,
            "--json",
            sets=("model.kind=python:models:tires", "dynamism.cases=[]", "checkpoint.every=0"),
        )
    )
    assert (done.status, done.out) == (1, "")
    assert done.line == (
        "dynmo: rank 1: ArithmeticError: tired of this (models.py:13), in F of layer 2; the "
        "traceback is in runs/main/rank-1.log"
    )
    assert 'models.py", line 13, in forward' in (work / "runs/main/rank-1.log").read_text()
    assert steps(work, "main") == 2
    assert run(work, "run.toml").line.startswith(
        "dynmo: runs/main exists; go on with --resume, replace it with --overwrite"
    )


def test_a_loss_that_is_no_number(work: Path) -> None:
    """The run also says, once, that ranks take turns on too few cores."""
    done = end(
        train(
            work, sets=(*GPT, "train.lr=1e30", "train.max_grad_norm=0", f"parallel.threads={CORES}")
        )
    )
    assert (done.status, done.out) == (1, "")
    warning, line = (line for line in done.err.splitlines() if line.startswith("dynmo:"))
    assert re.fullmatch(
        (
            rf"dynmo: 2 ranks of {CORES} threads on {CORES} cores: ranks take turns, so timings "
            rf"say little"
        ),
        warning,
    )
    assert re.fullmatch(
        (
            r"dynmo: step \d+: loss \S+, gradient norm (nan|inf); nothing was updated. Lower "
            r"train.lr or check the data"
        ),
        line,
    )
    assert "Traceback" not in done.err


def test_a_rank_that_is_killed(work: Path) -> None:
    process = train(work, sets=LONG)
    wait_until(lambda: steps(work, "main") >= 1)
    os.kill(ranks(work)[1], signal.SIGKILL)
    done = end(process, 10)
    assert (done.status, done.out, done.line) == (
        1,
        "",
        "dynmo: rank 1 was ended by SIGKILL; out of memory?",
    )


def test_a_rank_that_hangs(work: Path) -> None:
    process = train(work, sets=(*LONG, "parallel.timeout=3"))
    wait_until(lambda: steps(work, "main") >= 1)
    os.kill(ranks(work)[1], signal.SIGSTOP)
    done = end(process, 15)
    assert (done.status, done.out) == (1, "")
    assert re.fullmatch(r"dynmo: rank 0 waited 3 s for rank 1: .+", done.line)


def test_stopped_while_starting(work: Path) -> None:
    process = train(work)
    wait_until(lambda: len(ranks(work)) == 2)
    time.sleep(0.7)
    os.killpg(process.pid, signal.SIGINT)
    assert end(process, 5) == (130, "", "dynmo: interrupted while starting or finishing\n")
    assert not list((work / "runs").iterdir())


# -- worlds that others start ----------------------------------------------------------------------


def test_torchrun(base: Base, work: Path) -> None:
    """The ranks meet in a file and at 127.0.0.1: no port is open to the network."""
    options = [
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=store",
        "--rdzv-conf=store_type=file",
        "--rdzv-id=test",
        "--local-addr=127.0.0.1",
    ]
    command = [sys.executable, "-m", "torch.distributed.run", *options, "--nproc-per-node=2"]
    command += ["-m", "dynmo", "train", "run.toml", "--json"]
    done = end(
        start(command, work, {"PYTHONWARNINGS": "", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
    )
    assert done.status == 0, done.err
    assert json.loads(done.out)["weights_digest"] == json.loads(base.done.out)["weights_digest"]
    assert set(tree(work / "runs/main")) >= {"config.toml", "events.jsonl", "trace.json"}


def test_a_world_of_another_size(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path)
    for key, value in {
        "RANK": "0",
        "WORLD_SIZE": "3",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(key, value)
    done = run(tmp_path, "run.toml")
    assert (done.status, done.out) == (2, "")
    assert done.line == (
        "dynmo: the launcher started 3 ranks, but parallel.pipeline x data = 2; start as many as "
        "the config says"
    )
    assert not (tmp_path / "runs").exists()


def test_a_joined_rank_that_raises(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No launcher of ours tells the cause, so the rank does.

    The run that --overwrite names is replaced.
    """
    fill(tmp_path)
    (tmp_path / "runs/main").mkdir(parents=True)
    (tmp_path / "runs/main/config.toml").write_text("")
    (tmp_path / "runs/main/old").write_text("of an earlier run")
    world = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for key, value in (world | {"GLOO_SOCKET_IFNAME": "lo", "LOCAL_WORLD_SIZE": "1"}).items():
        monkeypatch.setenv(key, value)
    sets = ("model.kind=python:models:tires", "dynamism.cases=[]", "parallel.pipeline=1")
    done = run(tmp_path, "run.toml", "--overwrite", sets=sets)
    assert (done.status, done.out.count("\n")) == (1, 2)
    assert done.line == (
        "dynmo: rank 0: ArithmeticError: tired of this (models.py:13), in F of layer 2 "
        "(DYNMO_TRACEBACK=1 shows more)"
    )
    assert set(tree(tmp_path / "runs/main")) == {"config.toml", "events.jsonl"}
    # Wrong input leaves what was there.
    before = tree(tmp_path)
    done = run(
        tmp_path, "run.toml", "--overwrite", sets=("model.kind=python:models:raises", *sets[1:])
    )
    assert (done.status, done.err.count("\n")) == (2, 1)
    assert tree(tmp_path) == before
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["main"]
    done = run(
        tmp_path, "run.toml", sets=("name=new", "model.kind=python:models:raises", *sets[1:])
    )
    assert not (tmp_path / "runs/new").exists()


def test_a_text_that_is_cut_off(work: Path) -> None:
    """A text that is cut off during training gives the reason, and no signal."""
    process = train(work, sets=(*LONG, "parallel.timeout=6.0"))
    wait_until(lambda: steps(work, "main") >= 3)
    os.truncate(work / "text", 0)
    done = end(process, 15)
    assert (done.status, done.out) == (1, "")
    told = 'dynmo: data.source = "file:text": has been cut off: it had 19000 bytes'
    assert done.line.startswith(told)
    assert "SIGBUS" not in done.err


def test_a_crash(work: Path) -> None:
    """The terminal has one line, and the stack is in the rank's log."""
    done = end(train(work, sets=("model.kind=python:models:crashes", "dynamism.cases=[]")))
    assert (done.status, done.out, done.err.count("\n")) == (1, "", 1)
    told = re.fullmatch(r"dynmo: rank \d was ended by SIGSEGV; see (\S+/rank-\d.log)", done.line)
    assert told is not None
    assert "in crashes" in (work / told[1]).read_text()


def test_a_model_that_differs_by_rank(work: Path) -> None:
    """The first layer that differs is named before anything else is exchanged."""
    sets = ("model.kind=python:models:longer", "dynamism.cases=[]", "parallel.timeout=6.0")
    done = end(train(work, sets=sets))
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
    told = "dynmo: layer 2 is not the same on rank 0 and rank 1 (on rank"
    assert done.line.startswith(told)
    assert not list((work / "runs").iterdir())


def test_configs_that_differ_by_rank(work: Path) -> None:
    """Every rank says so, each with its own value.

    The limit of a wait is each rank's own.
    """
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    sets = [("train.lr=0.5", "parallel.timeout=20"), ("train.lr=0.25", "parallel.timeout=30")]
    ranks = [train(work, sets=sets[r], env=world | {"RANK": str(r)}) for r in range(2)]
    for rank, done in enumerate(map(end, ranks)):
        mine = f"train.{sets[rank][0][6:].replace('=', ' = ')} on rank {rank}"
        assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
        assert done.line.startswith(f"dynmo: rank 0 and rank 1 have different configs ({mine});")
    assert not list((work / "runs").iterdir())


def test_a_silent_listener_at_the_port(work: Path) -> None:
    """Something else has MASTER_PORT and never answers.

    The run ends with one line, and does not wait for ever.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        world = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        world["MASTER_PORT"] = str(server.getsockname()[1])
        done = end(train(work, sets=("parallel.timeout=1.0",), env=world), 30)
    told = "dynmo: rank 1 waited 1 s for the store of rank 0 at 127.0.0.1:"
    assert (done.status, done.out, done.err.count("\n")) == (1, "", 1)
    assert done.line.startswith(told)
    assert not (work / "runs").exists()


def test_slurm_and_its_signals(work: Path) -> None:
    """Two tasks run. One is asked to stop, and both stop after the same step."""
    job = {
        "SLURM_NTASKS": "2",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "localhost",
        "MASTER_PORT": free_port(),
    }
    tasks = [
        train(
            work, "--json", sets=LONG, env=job | {"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)}
        )
        for i in range(2)
    ]
    wait_until(lambda: steps(work, "main") >= 3)
    tasks[1].send_signal(signal.SIGINT)
    first, second = end(tasks[0]), end(tasks[1])
    assert (first.status, second.status) == (130, 130)
    assert (second.out, second.err) == ("", "")
    result = json.loads(first.out)
    assert (result["interrupted"], result["steps"]) == (True, steps(work, "main"))
    assert events(work, "main")[-1]["reason"] == "interrupted"
