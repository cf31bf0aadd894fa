"""Measurements that benchmarks share: ranks on this machine, sides in turn, medians.

`benchmarks.output` prints and draws the figures.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

import tomli_w

from dynmo.elastic.launcher.rank_side import enter_rank, report_failure
from dynmo.elastic.launcher.supervisor import spawn
from dynmo.errors import RunError
from dynmo.schedule.op import Kind

if TYPE_CHECKING:
    from torch import Tensor

    from dynmo.runtime.engine.batch_check import Inputs, Targets
    from dynmo.runtime.engine.engine import Engine
    from dynmo.runtime.engine.step_reduction import StepRecord
    from dynmo.runtime.layer.layer import Layer

Taken = TypeVar("Taken")
# Of runs whose loss is a figure.
OPTIMIZER = {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}


def run_step(
    engine: Engine,
    step: int,
    inputs: Inputs,
    targets: Targets,
    lr: float = 0.0,
    max_norm: float = 0.0,
) -> StepRecord:
    """Trains on a batch, and waits until the step is final."""
    from dynmo.runtime.engine.batch_check import StepBatch, StepSettings

    settings = StepSettings(step, lr, max_norm)
    return (engine.train(StepBatch(inputs, targets), settings) + engine.drain())[-1]


def run_ranks(function: str, ranks: int, device: str = "cpu", **arguments: Any) -> Any:
    """Calls a function on several local ranks, one thread each.

    On "cuda" each rank has a device of its own. On "cuda:0" they share it: their messages pass
    through host memory.
    """
    if ":" in device:
        # The ranks' kernels do not wait on the device, so modules may be loaded late. Loading all
        # of them takes long.
        os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "result.json"
        command = [
            sys.executable,
            "-m",
            "benchmarks.harness",
            function,
            json.dumps(arguments),
            str(out),
            device,
        ]
        status = spawn(command, ranks, 1, Path(name))
        if status:
            sys.exit(status)
        return json.loads(out.read_text())


def train(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs `dynmo train` in processes of its own, and returns its events."""
    with tempfile.TemporaryDirectory(prefix="dynmo-benchmark-") as name:
        folder = Path(name)
        (folder / "run.toml").write_text(tomli_w.dumps({"name": "run", **config}))
        command = [sys.executable, "-m", "dynmo", "train", "run.toml"]
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}  # cases of benchmarks
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=300, env=env
        )
        if done.returncode:
            raise RunError(
                f"dynmo train ended with status {done.returncode}: {done.stderr[-1000:]}"
            )
        lines = (folder / "runs/run/events.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


def train_each(
    function: str, given: Sequence[dict[str, Any]], jobs: int, what: str
) -> list[dict[str, Any]]:
    """Calls a function on one rank for each set of arguments, so many at once."""
    from rich.console import Console
    from rich.progress import track

    with ProcessPoolExecutor(jobs, get_context("spawn")) if jobs > 1 else nullcontext() as pool:
        done = (pool.map if pool else map)(partial(_on_one_rank, function), given)
        return list(track(done, what, len(given), console=Console(stderr=True)))


def _on_one_rank(function: str, given: dict[str, Any]) -> Any:
    return run_ranks(function, 1, **given)


def alternate(
    sides: Mapping[str, Callable[[], Taken]], rounds: int, warmup: int
) -> dict[str, list[Taken]]:
    """Calls the sides in turn, round after round, so that all meet the same machine.

    Each round begins with another side.
    """
    times: dict[str, list[Taken]] = {name: [] for name in sides}
    names = list(sides)
    for turn in range(warmup + rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            taken = sides[name]()
            if turn >= warmup:
                times[name].append(taken)
    return times


def elapsed(run: Callable[[], object]) -> float:
    """Returns the seconds of a call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def time_layer(
    layer: Layer, inputs: tuple[Tensor, ...], gradients: tuple[Tensor, ...]
) -> tuple[float, float, float]:
    """Runs a layer on one microbatch, and returns the seconds of F, B and W.

    Args:
        layer: The layer.
        inputs: B yields gradients of those that require one.
        gradients: One for each output that requires one.
    """
    layer.begin()
    layer.marks.clear()
    layer.forward(0, inputs, 0)
    layer.backward_input(0, gradients, True)
    layer.backward_weight(0)
    seconds = {kind: end - start for kind, start, end, _ in layer.marks}
    return seconds[Kind.F], seconds[Kind.B], seconds[Kind.W]


def start_together() -> float:
    """Waits on every rank for the others, and then for an agreed moment.

    Ranks leave a barrier apart if they share cores.
    """
    import torch
    import torch.distributed as dist

    from dynmo.models.emulated import sleep_until

    moment = torch.tensor(time.perf_counter() + 0.03, dtype=torch.float64)
    dist.all_reduce(moment, dist.ReduceOp.MAX)
    sleep_until(moment.item())
    return moment.item()


def medians(times: dict[str, list[float]]) -> dict[str, float]:
    return {name: median(values) for name, values in times.items()}


def part_medians(times: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, list[float]]:
    """Returns medians for sides that return the seconds of their parts."""
    return {
        name: [median(part) for part in zip(*rows, strict=True)] for name, rows in times.items()
    }


def bound_of(share: float, lost: dict[str, float], least: float = 0.85) -> dict[str, Any]:
    """Says what keeps a saving from its ideal."""
    return {"lost": lost, "bounded_by": max(lost, key=lost.__getitem__) if share < least else None}


def _rank() -> int:
    import torch

    from dynmo.runtime.comm.meeting import Meeting
    from dynmo.runtime.comm.rendezvous import from_environment
    from dynmo.runtime.comm.store import open_store

    enter_rank()
    module, _, name = sys.argv[1].partition(":")
    try:
        rendezvous = from_environment()
        assert rendezvous is not None
        torch.set_num_threads(1)
        store, device = open_store(rendezvous, 120), torch.device(sys.argv[4])
        shares = device.index is not None
        if device.type == "cuda" and not shares:
            device = torch.device("cuda", rendezvous.local_rank)
            torch.cuda.set_device(device)
        world = Meeting.join(
            store,
            rendezvous.rank,
            rendezvous.size,
            device=device,
            timeout=120,
            staged=shares,
        )
        result = getattr(importlib.import_module(module), name)(world, **json.loads(sys.argv[2]))
        world.close()
    except Exception as error:
        import traceback

        traceback.print_exc()
        return report_failure(error)
    if rendezvous.rank == 0:
        Path(sys.argv[3]).write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(_rank())
