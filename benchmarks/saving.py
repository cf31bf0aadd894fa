"""How long training waits for a checkpoint, and what it costs meanwhile.

Real: one rank of one thread. Its linear layers have 1 GB of weights and moments. Four kinds of
steps take turns:

1. plain steps
2. steps after `save(wait=False)`, which copies the layers to memory
3. steps while a process beside the rank writes
4. steps after `save()`, which waits for the disk

`copy` is the time in which torch copies the same tensors in memory. A save delays a step by at
least as long. `delay` is by how much the next step begins later. `slower` is by how much a step
takes longer while the process writes. `share` is the part of a run that both take, if it saves
every ten minutes, as by default. Seconds are medians.

python -m benchmarks.saving
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import dynmo
from benchmarks.output import main
from dynmo.events import CheckpointEvent, Event
from dynmo.pipeline.autosave import EVERY

HIDDEN, ROUNDS = 3000, 5
LAYERS = 10  # of 36 MB, and twice as much in moments


def seconds_of(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class Training:
    """A pipeline on one rank."""

    def __init__(self, world: dynmo.World, folder: Path, hidden: int) -> None:
        self.folder, self.events = folder, list[Event]()
        layers = [nn.Linear(hidden, hidden, bias=False) for _ in range(LAYERS)]
        self.pipeline = dynmo.Pipeline(
            dynmo.Sequential(layers, loss=nn.functional.mse_loss),
            world,
            schedule="1f1b",
            microbatches=1,
            log=dynmo.Log(listen=self.events.append),
        )
        self._batch = torch.randn(8, hidden), torch.randn(8, hidden)

    def step(self) -> float:
        return seconds_of(lambda: self.pipeline.step(*self._batch))

    def save(self, wait: bool) -> float:
        return seconds_of(lambda: self.pipeline.save(self.folder, keep=1, wait=wait))

    @property
    def is_saved(self) -> bool:
        """Whether the last checkpoint is complete, which a step finds out."""
        return any(isinstance(event, CheckpointEvent) for event in self.events)

    @property
    def tensors(self) -> list[Tensor]:
        own = self.pipeline.mesh.store.own.values()
        return [t.detach() for m, o in own for t in (*m.parameters(), *o.state().values())]

    def copy(self) -> float:
        tensors = self.tensors
        return seconds_of(lambda: [t.clone() for t in tensors])


def measure(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    times: dict[str, list[float]] = {
        key: [] for key in ("plain", "copy", "behind", "meanwhile", "waiting", "written")
    }
    with tempfile.TemporaryDirectory() as folder, dynmo.init(device="cpu") as world:
        training = Training(world, Path(folder), options.hidden)
        training.step()
        training.save(wait=False)  # the process starts
        training.save(wait=True)
        for _ in range(options.rounds):
            times["plain"] += [training.step() for _ in range(5)]
            times["copy"].append(training.copy())
            training.events.clear()
            begun = time.perf_counter()
            times["behind"].append(training.save(wait=False))
            while not training.is_saved:
                times["meanwhile"].append(training.step())
            times["written"].append(time.perf_counter() - begun)
            times["waiting"].append(training.save(wait=True))
        size = sum(t.nbytes for t in training.tensors)
    middle = {key: median(each) for key, each in times.items()}
    # The last step of those meanwhile completes the checkpoint.
    lost = middle["behind"] + middle["written"] * (1 - middle["plain"] / middle["meanwhile"])
    return {
        "bytes": size,
        "seconds": middle,
        "delay_over_copy": middle["behind"] / middle["copy"],
        "delay_over_waiting": middle["behind"] / middle["waiting"],
        "slower": middle["meanwhile"] / middle["plain"] - 1,
        "share": max(0.0, lost) / EVERY,
    }


if __name__ == "__main__":
    main(
        __doc__ or "",
        measure,
        [("hidden", HIDDEN, "width of a layer"), ("rounds", ROUNDS, "rounds")],
    )
