"""Runs that a fault hits in the middle: `python -m tests.train.disturbed` reads jobs from stdin.

Importing torch costs seconds, and a fork of this process milliseconds. Each job is a run whose
ranks are forks, which a fault may kill. A fault comes when the last rank calls a function of dynmo
for the n-th time, or rank 0 if no other does. Signals go to all ranks. A full disk and a dead
writer are those of one rank.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple, cast
from unittest import mock

import dynmo
from dynmo.config import Config, parse
from dynmo.errors import DynmoError
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.state import background, checkpoint
from dynmo.train.setup import model_of
from dynmo.train.trainer import Trainer

STEPS = 9
CONFIG: dict[str, Any] = {
    "model": {"blocks": 1, "hidden": 8, "heads": 1, "sequence": 8},
    "train": {"steps": STEPS, "global_batch": 4, "micro_batch": 1, "eval_every": 3}
    | {"reduction_slots": 2},
    "checkpoint": {"every": 2},
    "dynamism": {"cases": ["freezing"], "freezing": {"every": 1, "start": 2, "max_layers": 1}},
    "trace": {"steps": 0},
}
PHASES = {
    "compiles": "dynmo.runtime.engine.programs.Programs.executor",
    "trains": "dynmo.runtime.engine.engine.Engine.train",
    "evaluates": "dynmo.runtime.engine.engine.Engine.evaluate",
    "freezes": "dynmo.pipeline.actions.Actions.freeze",
    "copies": "dynmo.runtime.state.save.Save.take",
    "writes": "dynmo.runtime.state.background.MemoryFiles.send",
    "completes": "dynmo.runtime.state.save._complete",
    "ends": "dynmo.pipeline.pipeline.Pipeline.digest",
}
"""The function whose call begins a phase of a run. The fault of "writes" comes after it."""


class Fault(NamedTuple):
    """What happens in which call of a phase: "kill", "term", "disk" or "writer"."""

    kind: str
    phase: str
    call: int = 1

    def strike(self) -> None:
        if self.kind == "kill":
            os.killpg(0, signal.SIGKILL)
        elif self.kind == "term":
            os.killpg(0, signal.SIGTERM)
        elif self.kind == "writer":
            background._running().process.kill()
        else:
            # The disk is full from now on, for this process and for one that it starts.
            resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
            if self.phase != "writes":
                background._end()


def run(folder: Path, mesh: tuple[int, int], resume: bool, fault: Fault | None) -> str:
    """Trains as one rank of a mesh, and returns the digest of the weights."""
    pipeline, replicas = mesh
    config: Config = parse(CONFIG | {"parallel": {"pipeline": pipeline, "replicas": replicas}})
    (folder / "config.toml").write_text(config.to_toml())
    with ExitStack() as stack:
        world = stack.enter_context(dynmo.init(device="cpu"))
        if fault is not None:
            target = PHASES[fault.phase]
            stack.enter_context(mock.patch(target, struck(target, fault)))
        return (
            Trainer(config, cast(Meeting, world), model_of(config), folder, resume)
            .run()
            .weights_digest
        )


def struck(target: str, fault: Fault) -> Callable[..., Any]:
    """The function behind `target`, with a fault in one of its calls."""
    owner, _, name = target.rpartition(".")
    original, calls = getattr(resolve_name(owner), name), 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == fault.call and fault.phase != "writes":
            fault.strike()
        result = original(*args, **kwargs)
        if calls == fault.call and fault.phase == "writes":
            fault.strike()
        return result

    return call


def newest(folder: Path) -> int:
    """Steps of the newest checkpoint. 0 without one."""
    try:
        return checkpoint.find(folder / "checkpoints")[1].step
    except DynmoError:
        return 0


def rank(number: int, folder: Path, mesh: tuple[int, int], fault: Fault | None) -> None:
    """Runs a rank in this process, and ends it. Rank 0 says what came of it."""
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number)}
    struck = 0 if fault is None or fault.phase == "completes" else mesh[0] * mesh[1] - 1
    try:
        before = newest(folder)
        digest = run(folder, mesh, before > 0, fault if number == struck else None)
        answer: dict[str, Any] = {"digest": digest, "from": before}
    except DynmoError as error:
        answer = {"error": str(error)}
    background._end()
    if not number:
        print(json.dumps(answer), flush=True)
    os._exit(0)


def main() -> None:
    for line in sys.stdin:
        folder, mesh, fault = json.loads(line)
        size = mesh[0] * mesh[1]
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        ranks: list[int] = []
        for number in range(size):
            child = os.fork()
            if not child:
                os.setpgid(0, ranks[0] if ranks else 0)
                rank(number, Path(folder), mesh, Fault(*fault) if fault else None)
            os.setpgid(child, ranks[0] if ranks else child)  # whoever is first
            ranks.append(child)
        status, *_ = [os.waitpid(child, 0)[1] for child in ranks]
        if status:
            print(json.dumps({"signal": os.WTERMSIG(status)}), flush=True)


if __name__ == "__main__":
    main()
