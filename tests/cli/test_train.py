"""`dynmo train` as a process: what it writes, how it fails, how it stops, how it goes on.

Starting ranks costs seconds of importing torch, so one run serves many tests.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dynmo.cli import main
from dynmo.config import load
from tests.processes import gone, ranks, start, wait_until

# Emulated layers, so that timings mean something on any machine: freezing the first half moves the optimum, and layers move.
CONFIG = """
name = "main"
[model]
kind = "emulated"
layers = 6
f = 0.001
b = 0.001
w = 0.001
sequence = 16
bytes = 1024
[data]
source = "file:text"
[train]
steps = 40
global_batch = 8
micro_batch = 2
lr = 1e-2
eval_every = 20
[parallel]
pipeline = 2
timeout = 30.0
[balance]
every = 4
margin = 0.0
hysteresis = 0.0
[dynamism]
cases = ["freezing"]
[dynamism.freezing]
schedule = [[10, 3]]
[checkpoint]
every = 5
"""

MODELS = """# The line numbers of this file are told in errors.
import torch
from torch import nn

class Tires(nn.Module):
    calls = 0
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
    def forward(self, x):
        self.calls += 1
        if self.calls > 10:
            raise ArithmeticError("tired\\nof this")
        return self.linear(x)

def tires():
    print("a model may print")
    return [nn.Embedding(256, 8), nn.Linear(8, 8), Tires(), nn.Linear(8, 256)]

def misfit():
    return [nn.Embedding(256, 8), nn.Linear(9, 8), nn.Linear(8, 256)]

def raises():
    raise ArithmeticError("no model today")

def number():
    return 3

def three():
    return nn.Embedding(256, 8), nn.Linear(8, 8), nn.Linear(8, 256)

def empty():
    return []

constant = [nn.Linear(8, 8)]
"""
GPT = ("model.kind=gpt", "model.blocks=1", "model.hidden=32", "model.heads=2", "dynamism.cases=[]", "checkpoint.every=0")

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

STEP = {"loss", "tokens_per_s", "idle_ratio", "imbalance"}
REBALANCE = {"id", "from", "to", "moved_bytes", "seconds", "predicted_gain", "reason"}


class Done(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def line(self) -> str:
        """The one line that says what was wrong."""
        (line,) = [line for line in self.err.splitlines() if line.startswith("dynmo:")]
        assert "Traceback" not in self.err
        return line


def fill(folder: Path) -> None:
    (folder / "run.toml").write_text(CONFIG)
    (folder / "text").write_bytes(bytes(range(32, 127)) * 200)
    (folder / "models.py").write_text(MODELS)


def train(folder: Path, *arguments: str, name: str = "main", sets: tuple[str, ...] = (), env: Mapping[str, str] | None = None) -> Any:
    """Starts `dynmo train`."""
    changed = [word for text in (f"name={name}", *sets) for word in ("--set", text)]
    return start([sys.executable, "-m", "dynmo", "train", "run.toml", *changed, *arguments], folder, env)


def end(process: subprocess.Popen[str], seconds: float = 60) -> Done:
    out, err = process.communicate(timeout=seconds)
    return Done(process.returncode, out, err)


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return str(free.getsockname()[1])


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    path = folder / "runs" / name / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")] if path.exists() else []


def steps(folder: Path, name: str) -> int:
    return max((e["step"] + 1 for e in events(folder, name) if e["event"] == "step"), default=0)


def tree(folder: Path) -> dict[str, bytes]:
    """Every file with its content."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts}


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Path]:
    """A folder to train in. After the test no process works there, and no rendezvous folder is left."""
    fill(tmp_path)
    yield tmp_path
    left = not gone(tmp_path)
    for pid in ranks(tmp_path).values():
        os.kill(pid, signal.SIGKILL)
    assert not left
    assert not list((tmp_path / "tmp").glob("dynmo-*"))


class Base(NamedTuple):
    folder: Path
    done: Done
    events: list[dict[str, Any]]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    """One whole run: two ranks, freezing, rebalancing, checkpoints, --json."""
    folder = tmp_path_factory.mktemp("base")
    fill(folder)
    done = end(train(folder, "--json"))
    return Base(folder, done, events(folder, "main"))


# -- a whole run ------------------------------------------------------------------------------------------------------------


def test_what_a_run_says(base: Base) -> None:
    status, out, err = base.done
    assert status == 0
    assert out.count("\n") == 1
    result = json.loads(out)
    assert (result["name"], result["folder"], result["steps"], result["interrupted"]) == ("main", "runs/main", 40, False)
    assert (result["loss"], result["weights_digest"]) == (base.events[-1]["loss"], base.events[-1]["weights_digest"])
    assert "main 40/40  loss" in err
    assert "froze layers 0 to 2" in err
    assert "dynmo:" not in err


def test_what_a_run_writes(base: Base) -> None:
    """Nothing outside of its folder."""
    files = set(tree(base.folder))
    assert {f for f in files if not f.startswith("runs/main/checkpoints/")} == {
        "run.toml",
        "runs/main/costs.json",
        "text",
        "models.py",
        "runs/main/config.toml",
        "runs/main/events.jsonl",
        "runs/main/trace.json",
        "runs/main/rank-1.log",
    }
    assert (base.folder / "runs/main/rank-1.log").read_text() == ""
    assert (base.folder / "runs/main/checkpoints/latest").read_text() == "step-000040"
    assert not list((base.folder / "tmp").glob("dynmo-*"))
    assert gone(base.folder)
    assert load(base.folder / "runs/main/config.toml") == load(base.folder / "run.toml")


def test_the_events(base: Base) -> None:
    lines = (base.folder / "runs/main/events.jsonl").read_text().splitlines()
    assert [json.dumps(json.loads(line)) for line in lines] == lines, "numbers read back exactly"
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for event in base.events:
        assert event.keys() >= {"event", "step", "time"}
        by_kind.setdefault(event["event"], []).append(event)
    assert [e["step"] for e in by_kind["step"]] == list(range(40))
    assert all(e.keys() >= STEP for e in by_kind["step"])
    assert [e["frozen"] for e in by_kind["step"]] == [0] * 10 + [3] * 30
    for event in by_kind["rebalance"]:
        assert event.keys() >= REBALANCE
        assert sum(event["from"]) == sum(event["to"]) == 6
        assert event["moved_bytes"] > 0
    assert [e["id"] for e in by_kind["rebalance"]] == list(range(1, len(by_kind["rebalance"]) + 1))
    assert by_kind["step"][-1]["layers"][0] > 3, "half of the model was frozen, and nothing moved"
    assert all(e.keys() >= {"id", "measured_gain"} for e in by_kind["rebalance_result"])
    assert {e["id"] for e in by_kind["rebalance_result"]} <= {e["id"] for e in by_kind["rebalance"]}
    assert [e["step"] for e in by_kind["eval"]] == [19, 39]
    assert [e["step"] for e in by_kind["checkpoint"]] == list(range(4, 40, 5))
    (last,) = by_kind["end"]
    assert last == base.events[-1]
    assert (last["reason"], last["loss"]) == ("done", by_kind["step"][-1]["loss"])
    assert re.fullmatch("[0-9a-f]{64}", last["weights_digest"])
    assert last["seconds"] > 0


def test_the_trace(base: Base) -> None:
    trace = json.loads((base.folder / "runs/main/trace.json").read_text())
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert {e["tid"] for e in slices} == {0, 1}
    assert {e["cat"] for e in slices} >= {"F", "B", "W", "wait", "send"}
    assert all(e["dur"] >= 0 for e in slices)


def test_it_is_reported(base: Base, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(base.folder)
    assert main(["report", "runs/main"]) == 0
    out = capsys.readouterr().out
    assert "Measured, phase by phase" in out
    assert re.search(r"step \d+: moved 3\+3 to \d\+\d .* predicted", out)


# -- what is there already --------------------------------------------------------------------------------------------------


Run = Callable[..., Done]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`dynmo train` in this process, for what ends before any rank is started."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "models", raising=False)

    def call(folder: Path, *arguments: str, sets: tuple[str, ...] = ()) -> Done:
        monkeypatch.chdir(folder)
        status = main(["train", *arguments, *(word for text in sets for word in ("--set", text))])
        out = capsys.readouterr()
        return Done(status, out.out, out.err)

    return call


def test_a_run_is_not_lost(base: Base, run: Run) -> None:
    before = tree(base.folder)
    says = {
        (): "runs/main exists; go on with --resume, replace it with --overwrite, or choose another name",
        ("--resume", "--overwrite"): "--resume and --overwrite exclude each other",
        ("--overwrite", "--set", "data.source=file:nothing"): 'data.source = "file:nothing": cannot be read',
        ("--resume", "--set", "model.vocab=10", "--set", "model.kind=gpt"): "model.vocab = 10",
        ("--overwrite", "--set", "train.steps=many"): "--set: train.steps",
    }
    for arguments, text in says.items():
        done = run(base.folder, "run.toml", *arguments)
        assert (done.status, done.out) == (2, "")
        assert done.line.startswith(f"dynmo: {text}")
        assert tree(base.folder) == before


def test_what_is_no_run_is_not_lost(tmp_path: Path, run: Run) -> None:
    fill(tmp_path)
    (tmp_path / "runs/main").mkdir(parents=True)
    (tmp_path / "runs/main/thesis.txt").write_text("years of work")
    (tmp_path / "runs/file").write_text("no folder")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/config.toml").write_text("")
    (tmp_path / "runs/link").symlink_to(tmp_path / "elsewhere")
    before = tree(tmp_path)
    says = {
        ("--overwrite",): "runs/main does not look like a run (it has no config.toml)",
        ("--resume",): "runs/main has no checkpoint to resume from; start anew with --overwrite",
        ("--resume", "--set", "name=new"): "runs/new does not exist, so there is nothing to resume",
        ("--overwrite", "--set", "name=file"): "runs/file cannot be made ready",
        ("--overwrite", "--set", "name=link"): "runs/link cannot be made ready",
    }
    for arguments, text in says.items():
        done = run(tmp_path, "run.toml", *arguments)
        assert (done.status, done.out) == (2, "")
        assert done.line.startswith(f"dynmo: {text}")
        assert tree(tmp_path) == before


def test_stopped_killed_and_resumed(base: Base, work: Path) -> None:
    """Ctrl-C, then the launcher is killed, then to the end: the same weights as in one go. And once more: it is done."""
    process = train(work, name="cut")
    wait_until(lambda: steps(work, "cut") >= 8)
    os.killpg(process.pid, signal.SIGINT)
    done = end(process)
    assert done.status == 130
    assert "Traceback" not in done.err
    assert "Measured, phase by phase" in done.out
    assert "interrupted: loss" in done.out
    *_, saved, last = events(work, "cut")
    assert (last["event"], last["reason"], last["step"]) == ("end", "interrupted", steps(work, "cut"))
    assert (saved["event"], saved["path"]) == ("checkpoint", f"runs/cut/checkpoints/step-{last['step']:06d}")

    process = train(work, "--resume", name="cut")
    wait_until(lambda: steps(work, "cut") >= 23)
    process.kill()
    process.communicate()
    wait_until(lambda: gone(work), 5)
    for store in (work / "tmp").glob("dynmo-*/*"):  # nobody was there to remove it
        store.unlink()
        store.parent.rmdir()
    assert events(work, "cut")[-1]["event"] != "end"

    done = end(train(work, "--resume", "--json", name="cut"))
    assert done.status == 0
    result, expected = json.loads(done.out), json.loads(base.done.out)
    assert (result["weights_digest"], result["loss"]) == (expected["weights_digest"], expected["loss"])
    ids = [e["id"] for e in events(work, "cut") if e["event"] == "rebalance"]
    assert ids == sorted(ids)

    done = end(train(work, "--resume", name="cut"))
    assert (done.status, "done: loss" in done.out) == (0, True)
    assert events(work, "cut")[-1]["weights_digest"] == expected["weights_digest"]
    assert events(work, "cut")[-1]["loss"] == expected["loss"]


# -- what would run -----------------------------------------------------------------------------------------------------------


def test_dry_run(tmp_path: Path, run: Run) -> None:
    fill(tmp_path)
    before = tree(tmp_path)
    done = run(tmp_path, "run.toml", "--dry-run")
    assert (done.status, done.err) == (0, "")
    assert "zb-h1, 2 ranks, 4 microbatches" in done.out
    assert "emulated.5" in done.out
    # What a model of one's own prints does not get between.
    done = run(tmp_path, "run.toml", "--dry-run", "--json", sets=("model.kind=python:models:tires",))
    assert (done.status, done.err) == (0, "a model may print\n" * 2)
    plan = json.loads(done.out)
    assert (plan["partition"], plan["schedule"], plan["microbatches"], plan["limit"]) == ([2, 2], "zb-h1", 4, None)
    assert plan["parameters"] == [256 * 8 + 72, 72 + 9 * 256]
    done = run(tmp_path, "run.toml", "--dry-run", sets=(*GPT, f"pipeline.memory_limit={max(plan['memory'])}"))
    assert (done.status, done.out) == (2, "")
    limit = max(plan["memory"])
    assert re.fullmatch(rf"dynmo: rank 0 needs \d+ bytes at the peak of zb-h1, over pipeline.memory_limit = {limit}; use .*", done.line)
    assert tree(tmp_path) == before


# -- wrong input ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        (("train.stepz=3",), "--set: unknown key train.stepz; did you mean train.steps?"),
        (("train.steps=3.5",), "--set: train.steps = 3.5: must be"),
        (("train.steps=soon",), "--set: train.steps = \"soon\": must be"),
        (("parallel.pipeline=7",), "run.toml and --set: parallel.pipeline = 7 is more than the model's 6 layers"),
        (("train.micro_batch=3",), "run.toml and --set: train.micro_batch = 3 does not divide train.global_batch / parallel.data = 8"),
        (("data.source=file:nothing",), 'data.source = "file:nothing": cannot be read (No such file or directory)'),
        (("data.source=file:runs.d",), 'data.source = "file:runs.d": not a regular file'),
        ((*GPT, "model.vocab=255"), "model.vocab = 255: the corpus is bytes, so at least 256 tokens are needed"),
        (("name=../up",), "--set: name = \"../up\": must be"),
    ],
)  # fmt: skip
def test_what_is_known_at_once(tmp_path: Path, run: Run, sets: tuple[str, ...], says: str) -> None:
    fill(tmp_path)
    (tmp_path / "runs.d").mkdir()
    done = run(tmp_path, "run.toml", sets=sets)
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
    assert done.line.startswith(f"dynmo: {says}")
    assert not (tmp_path / "runs").exists()


def test_a_config_that_is_not_there(tmp_path: Path, run: Run) -> None:
    done = run(tmp_path, "nothing.toml")
    assert (done.status, done.line) == (2, "dynmo: nothing.toml: cannot be read (No such file or directory); give the path of a TOML file")
    (tmp_path / "bad.toml").write_text("[model\n")
    done = run(tmp_path, "bad.toml")
    assert (done.status, done.err.count("\n")) == (2, 1)
    assert done.line.startswith("dynmo: bad.toml: not valid TOML: ")


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("nowhere:make", "cannot import nowhere: No module named 'nowhere'; run from its folder or install it"),
        ("wrong:make", "importing wrong raised SyntaxError: "),
        ("models:absent", "models has no function absent"),
        ("models:constant", "models has no function constant"),
        ("models:number", "number() must return a list of torch modules, or (list, loss)"),
        ("models:three", "three() must return a list of torch modules, or (list, loss)"),
        ("models:empty", "empty() must return a list of torch modules, or (list, loss)"),
        ("models:raises", "raises() raised ArithmeticError: no model today (models.py:24)"),
        ("models:misfit", "on shapes alone, its layers raised RuntimeError: "),
    ],
)
def test_a_model_of_ones_own_that_is_none(tmp_path: Path, run: Run, caplog: pytest.LogCaptureFixture, function: str, says: str) -> None:
    fill(tmp_path)
    (tmp_path / "wrong.py").write_text("def make(:\n")
    done = run(tmp_path, "run.toml", "--dry-run", sets=(f"model.kind=python:{function}", "dynamism.cases=[]"))
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
    assert done.line.startswith(f"dynmo: model.kind = 'python:{function}': {says}")
    assert not caplog.records, "torch has printed too"


def test_what_only_the_ranks_can_know(work: Path) -> None:
    """The folder that was made for the run is gone again: it does not stand in the way of the next attempt."""
    done = end(train(work, sets=("model.kind=python:models:raises", "dynamism.cases=[]")))
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
    says = "raises() raised ArithmeticError: no model today (models.py:24)"
    assert done.line == f"dynmo: model.kind = 'python:models:raises': {says}"
    assert not list((work / "runs").iterdir())


# -- failures ---------------------------------------------------------------------------------------------------------------------


def test_a_rank_that_raises(work: Path, run: Run) -> None:
    """The cause is told, not what followed from it on the other rank; the traceback is in its log; the next attempt must choose."""
    done = end(train(work, "--json", sets=("model.kind=python:models:tires", "dynamism.cases=[]", "checkpoint.every=0")))
    assert (done.status, done.out) == (1, "")
    assert done.line == "dynmo: rank 1: ArithmeticError: tired of this (models.py:13); the traceback is in runs/main/rank-1.log"
    assert 'models.py", line 13, in forward' in (work / "runs/main/rank-1.log").read_text()
    assert steps(work, "main") == 2
    assert run(work, "run.toml").line.startswith("dynmo: runs/main exists; go on with --resume, replace it with --overwrite")


def test_a_loss_that_is_no_number(work: Path) -> None:
    """And that ranks take turns on too few cores is said, once."""
    done = end(train(work, sets=(*GPT, "train.lr=1e30", "train.max_grad_norm=0", f"parallel.threads={CORES}")))
    assert (done.status, done.out) == (1, "")
    warning, line = (line for line in done.err.splitlines() if line.startswith("dynmo:"))
    assert re.fullmatch(rf"dynmo: 2 ranks of {CORES} threads on {CORES} cores: ranks take turns, so timings say little", warning)
    assert re.fullmatch(r"dynmo: step \d+: loss \S+, gradient norm (nan|inf); nothing was updated. Lower train.lr or check the data", line)
    assert "Traceback" not in done.err


LONG = ("train.steps=100000", "checkpoint.every=0", "train.eval_every=0")


def test_a_rank_that_is_killed(work: Path) -> None:
    process = train(work, sets=LONG)
    wait_until(lambda: steps(work, "main") >= 1)
    os.kill(ranks(work)[1], signal.SIGKILL)
    done = end(process, 10)
    assert (done.status, done.out, done.line) == (1, "", "dynmo: rank 1 was ended by SIGKILL; out of memory?")


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


# -- worlds that others start -------------------------------------------------------------------------------------------------------


def test_torchrun(base: Base, work: Path) -> None:
    """The ranks meet in a file and at 127.0.0.1: no port is open to the network."""
    options = ["--rdzv-backend=c10d", "--rdzv-endpoint=store", "--rdzv-conf=store_type=file", "--rdzv-id=test", "--local-addr=127.0.0.1"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, "--nproc-per-node=2"]
    command += ["-m", "dynmo", "train", "run.toml", "--json"]
    done = end(start(command, work, {"PYTHONWARNINGS": "", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}))
    assert done.status == 0, done.err
    assert json.loads(done.out)["weights_digest"] == json.loads(base.done.out)["weights_digest"]
    assert set(tree(work / "runs/main")) >= {"config.toml", "events.jsonl", "trace.json"}


def test_a_world_of_another_size(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path)
    for key, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(key, value)
    done = run(tmp_path, "run.toml")
    assert (done.status, done.out) == (2, "")
    assert done.line == ("dynmo: the launcher started 3 ranks, but parallel.pipeline x data = 2; start as many as the config says")
    assert not (tmp_path / "runs").exists()


def test_a_joined_rank_that_raises(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher of ours tells the cause, so the rank does; and what --overwrite names is replaced."""
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
    assert done.line == "dynmo: rank 0: ArithmeticError: tired of this (models.py:13) (DYNMO_TRACEBACK=1 shows more)"
    assert set(tree(tmp_path / "runs/main")) == {"config.toml", "events.jsonl"}
    # Wrong input leaves nothing.
    done = run(tmp_path, "run.toml", "--overwrite", sets=("model.kind=python:models:raises", *sets[1:]))
    assert (done.status, done.err.count("\n")) == (2, 1)
    assert not (tmp_path / "runs/main").exists()


def test_slurm_and_its_signals(work: Path) -> None:
    """Two tasks; one is asked to stop, both do, after the same step."""
    job = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "localhost", "MASTER_PORT": free_port()}
    tasks = [train(work, "--json", sets=LONG, env=job | {"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)}) for i in range(2)]
    wait_until(lambda: steps(work, "main") >= 3)
    tasks[1].send_signal(signal.SIGINT)
    first, second = end(tasks[0]), end(tasks[1])
    assert (first.status, second.status) == (130, 130)
    assert (second.out, second.err) == ("", "")
    result = json.loads(first.out)
    assert (result["interrupted"], result["steps"]) == (True, steps(work, "main"))
    assert events(work, "main")[-1]["reason"] == "interrupted"
