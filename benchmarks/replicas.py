"""The cost of replicas: the hidden share of the reduction, and ZeRO-1's saving.

The hidden share is that part of the gradients' reduction that a rank's own work hides. ZeRO-1 saves
memory.

Two replicas of two stages, a GPT, four processes. Limits, written before measuring: half of the
reduction hidden, and a rank's optimizer state under 0.55 of the whole. With ZeRO-1 the parameters
are gathered after the optimizer, where nothing is left to hide them. That part is reported with the
rest, so the hidden share of ZeRO-1 is lower.

`could_hide` is the share that the measured times of this run allow, on the rank where it is least.
A layer's reduction starts when its last W has run. It hides behind the last W's of the layers that
are still to come.

    W of layers   9 8 7 6 5|          the step's end
    reduction       9999|8888|7777|...
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import alternate, run_ranks, run_step
from benchmarks.output import main
from dynmo.config import parse
from dynmo.plan.partition import uniform
from dynmo.runtime.comm.agreement import maxima
from dynmo.runtime.comm.process_mesh import arrange
from dynmo.runtime.comm.rank_group import RankGroup
from dynmo.runtime.engine.engine import Engine
from dynmo.runtime.options import EngineOptions
from dynmo.train.setup import model_of

HIDDEN, STATE = 0.5, 0.55
MICROBATCHES, WARMUP = 4, 2


def sides(world: RankGroup, rounds: int, hidden: int, blocks: int) -> dict[str, Any] | None:
    """Runs both ways in turn, on the same ranks."""
    model = {"blocks": blocks, "hidden": hidden, "heads": 4, "sequence": 64}
    here = arrange(world, 2)
    text = torch.randint(
        256, (MICROBATCHES, 2, 65), generator=torch.Generator().manual_seed(here.replica)
    )
    both = {
        name: ReplicatedPipeline(here, model, text, zero)
        for name, zero in (("plain", 0), ("zero", 1))
    }
    times = alternate({name: side.step for name, side in both.items()}, rounds, warmup=WARMUP)
    out = {name: side.figures(times[name]) for name, side in both.items()}
    digests = {side.pipeline.digest() for side in both.values()}
    assert len(digests) == 1, "ZeRO-1 changed the weights"
    return out if world.rank == 0 else None


class ReplicatedPipeline:
    """A pipeline of one replica, and the seconds that its reductions take.

    Attributes:
        pipeline: The engine.
    """

    def __init__(self, here: RankGroup, model: dict[str, Any], text: Tensor, zero: int) -> None:
        loaded = model_of(parse({"model": model}))
        self.pipeline = Engine(
            here,
            loaded,
            uniform(loaded.layers, here.size),
            EngineOptions("zb-h1", microbatches=MICROBATCHES, accumulation_groups=2, zero=zero),
        )
        self._text = text
        self._reductions: list[tuple[float, float]] = []

    def step(self) -> float:
        """Runs one step, and returns its seconds."""
        pipeline, text, count = self.pipeline, self._text, len(self._reductions)
        before, start = pipeline.store.replicas.seconds, time.perf_counter()
        run_step(pipeline, count, text[..., :-1], text[..., 1:], 1e-3, 1.0)
        end = time.perf_counter()
        worked, waited = pipeline.store.replicas.seconds
        self._reductions.append((worked - before[0], waited - before[1]))
        return end - start

    def figures(self, times: list[float]) -> dict[str, float]:
        """Returns the medians of the counted steps, on the worst rank."""
        pipeline = self.pipeline
        worked, waited = (median(x) for x in zip(*self._reductions[WARMUP:], strict=True))
        state = sum(optimizer.state_bytes for _, optimizer in pipeline.store.own.values())
        costs = pipeline.costs()
        own = [costs[index] for index in sorted(pipeline.store.own, reverse=True)]
        bytes_each = [layer.gradient_bytes for layer in own]
        exposed = 1 - could_hide(
            [layer.w for layer in own], [worked * size / sum(bytes_each) for size in bytes_each]
        )
        return {
            "step_seconds": maxima(pipeline.store.world, (median(times),))[0],
            "reduction_seconds": maxima(pipeline.store.world, (worked,))[0],
            "waited_seconds": maxima(pipeline.store.world, (waited,))[0],
            "hidden": 1 - maxima(pipeline.store.world, (waited / worked,))[0],
            "could_hide": 1 - maxima(pipeline.store.world, (exposed,))[0],
            "optimizer_bytes": int(maxima(pipeline.store.world, (state,))[0]),
        }


def could_hide(weights: list[float], reductions: list[float]) -> float:
    """Returns the share of the reductions that ends before the last W does.

    The reductions run one after another.
    """
    now = free = 0.0
    for weight, reduction in zip(weights, reductions, strict=True):
        now += weight
        free = max(free, now) + reduction
    return 1 - (free - now) / sum(reductions)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    result = run_ranks(
        "benchmarks.replicas:sides",
        4,
        rounds=options.rounds,
        hidden=options.hidden,
        blocks=options.blocks,
    )
    state = result["zero"]["optimizer_bytes"] / result["plain"]["optimizer_bytes"]
    return {
        "mesh": "2 replicas x 2 stages, 4 processes",
        **result,
        "state_share": state,
        "limits": {"hidden": HIDDEN, "state_share": STATE},
        "within": {"hidden": result["plain"]["hidden"] >= HIDDEN, "state_share": state <= STATE},
    }


if __name__ == "__main__":
    main(
        "What replicas cost: reduction hidden, ZeRO-1 memory.",
        measure,
        [
            ("rounds", 12, "steps of each side"),
            ("hidden", 256, "model.hidden"),
            ("blocks", 4, "model.blocks"),
        ],
    )
