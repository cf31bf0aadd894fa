"""`dynmo train` as a process: helpers that start it and look at its results."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.processes import start

# Emulated layers, so that timings mean something on any machine: freezing the first half moves the
# optimum, and layers move.
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

def empty():
    return []

constant = [nn.Linear(8, 8)]

def longer():
    return [nn.Embedding(256, 8), *(nn.Linear(8, 8) for _ in range(1 + rank())), nn.Linear(8, 256)]

def crashes():
    import ctypes
    ctypes.string_at(0)

def rank():
    import os
    return int(os.environ.get("RANK", "0"))

class Cuts(Tires):
    def forward(self, x):
        self.calls += 1
        if self.calls == 6:
            open("text", "w").close()
        return self.linear(x)

def cuts():
    return [nn.Embedding(256, 8), Cuts(), nn.Linear(8, 256)]
"""
GPT = ("model.kind=gpt", "model.blocks=1", "model.hidden=32", "model.heads=2")
GPT += ("dynamism.cases=[]", "checkpoint.every=0")
ONE_RANK = "parallel.pipeline=1"
LONG = ("train.steps=100000", "checkpoint.every=0", "train.eval_every=0")


class Done(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def good(self) -> str:
        """Stdout of a command that succeeded and said nothing else."""
        assert (self.status, self.err) == (0, ""), self
        return self.out

    @property
    def line(self) -> str:
        """The one line that says what was wrong. A rank's progress may stand before it."""
        (line,) = [line for line in self.err.splitlines() if line.startswith("dynmo:")]
        assert "Traceback" not in self.err
        return line


def assert_refused(done: Done, *mentions: object, status: int = 2) -> None:
    """Checks that a command printed nothing but one line on stderr."""
    assert (done.status, done.out, done.err.count("\n")) == (status, "", 1), done
    for mention in mentions:
        assert str(mention) in done.line


def fill(folder: Path) -> None:
    (folder / "run.toml").write_text(CONFIG)
    (folder / "text").write_bytes(bytes(range(32, 127)) * 200)
    (folder / "models.py").write_text(MODELS)


def train(
    folder: Path,
    *arguments: str,
    name: str = "main",
    sets: tuple[str, ...] = (),
    env: Mapping[str, str] | None = None,
) -> Any:
    """Starts `dynmo train run.toml` in `folder`."""
    changed = [word for text in (f"name={name}", *sets) for word in ("--set", text)]
    return start(
        [sys.executable, "-m", "dynmo", "train", "run.toml", *changed, *arguments], folder, env
    )


def end(process: subprocess.Popen[str], seconds: float = 60) -> Done:
    """Waits for a process and returns its status, stdout and stderr."""
    out, err = process.communicate(timeout=seconds)
    return Done(process.returncode, out, err)


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return str(free.getsockname()[1])


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    """The events of a run so far, without a torn last line."""
    path = folder / "runs" / name / "events.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def steps(folder: Path, name: str) -> int:
    """The number of steps that a run has logged."""
    return max((e["step"] + 1 for e in events(folder, name) if e["event"] == "step"), default=0)


def tree(folder: Path) -> dict[str, bytes]:
    """Every file with its content."""
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in folder.rglob("*")
        if p.is_file() and "__pycache__" not in p.parts
    }


class Base(NamedTuple):
    """A run that was asked to stop, went on, lost a rank, and went on again."""

    folder: Path
    asked: Done
    killed: Done
    left: bool
    done: Done
    events: list[dict[str, Any]]


Run = Callable[..., Done]  # a command in this process, with its arguments
