"""What it costs to be ready for a dead rank, while none dies.

Real: two ranks of one thread each train two equal pipelines in turn, step by step. One of them
copies its layers before each step (`elastic.recover = "memory"`), and the other one does not.

1. linear  linear layers. Copies share the two cores with the training, as on any CPU.
2. asleep  the same layers, each of whose passes sleeps, as a GPU works while its host is idle.

`slower` is the share by which a step takes longer. `limit` is the share of a step in which one core
copies the rank's own layers, if nothing of that is hidden. The other rank reads them where they
are. `bytes` is what the copies take on a rank, and `layers` the weights and moments of its layers.
Seconds are medians.

python -m benchmarks.copies
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import TYPE_CHECKING, Any, cast

from benchmarks.harness import run_ranks
from benchmarks.output import main

if TYPE_CHECKING:
    from dynmo.pipeline.recovery import Recovery
    from dynmo.runtime.comm.meeting import Meeting

LAYERS, ROUNDS, SLEEP = 8, 30, 0.01


def train(world: Meeting, hidden: int, rows: int, sleep: float, rounds: int) -> dict[str, Any]:
    """Trains both pipelines on one rank. Returns this rank's figures."""
    import torch
    from torch import nn

    import dynmo

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(hidden, hidden, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if sleep:
                time.sleep(sleep)
            return self.linear(x)

    def pipeline(elastic: dynmo.Elastic | None) -> dynmo.Pipeline:
        torch.manual_seed(0)
        model = dynmo.Sequential([Layer() for _ in range(LAYERS)], loss=nn.functional.mse_loss)
        return dynmo.Pipeline(model, world, schedule="1f1b", microbatches=4, elastic=elastic)

    sides = {"plain": pipeline(None), "copies": pipeline(dynmo.Elastic(recover="memory"))}
    batch = torch.randn(rows, hidden), torch.randn(rows, hidden)
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 3):
        for name, side in sides.items():
            start = time.perf_counter()
            side.step(*batch)
            if turn > 2:
                times[name].append(time.perf_counter() - start)
    own = sides["copies"].mesh.store.own.values()
    tensors = [t.detach() for m, o in own for t in (*m.parameters(), *o.state().values())]
    copied: list[float] = []
    for _ in range(5):
        start = time.perf_counter()
        [t.clone() for t in tensors]
        copied.append(time.perf_counter() - start)
    recovery = cast("Recovery", sides["copies"]._parts.recovery)
    return {
        "seconds": {name: median(each) for name, each in times.items()},
        "copy": median(copied),
        "layers": sum(t.nbytes for t in tensors),
        "bytes": recovery.nbytes,
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    out = dict[str, Any]()
    for name, sleep in (("linear", 0.0), ("asleep", SLEEP)):
        figures = run_ranks(
            "benchmarks.copies:train",
            2,
            hidden=options.hidden,
            rows=options.rows,
            sleep=sleep,
            rounds=options.rounds,
        )
        plain, copies = figures["seconds"]["plain"], figures["seconds"]["copies"]
        out[name] = figures | {
            "slower": copies / plain - 1,
            "limit": figures["copy"] / plain,
        }
    return out


if __name__ == "__main__":
    main(
        __doc__ or "",
        measure,
        [
            ("hidden", 512, "width of a layer"),
            ("rows", 2048, "samples of a batch"),
            ("rounds", ROUNDS, "steps of each pipeline"),
        ],
    )
