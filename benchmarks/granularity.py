"""W whole, or one linear at a time while a message is late.

`pipeline.w_granularity` chooses between the two. The same schedules run both ways, in turn, in one
run.

Real: a GPT on 2 ranks of one thread, ZB-H1, cut evenly by measured time and with more on the last
rank. Emulated: 4 ranks of several layers each. The ranks are alike, or their ops take longer or
shorter at random, or one rank is slower.

The two should take the same time if there is nothing to fill. One rank never waits. 1F1B never
defers. Ranks that are all alike only wait as long as messages take.

The gain is the time of "whole" over that of "linear", of medians. No order of the same ops is
shorter than the busiest rank's ops: that is the limit. `fillable` is how long ranks waited, with
"whole", while there was W to run. `filled` is the W that "linear" has run in such waits. Both are
shares of a step, means over the ranks.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from random import Random
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.executor import MESSAGE_BYTES, gpt, timed
from benchmarks.harness import alternate, run_ranks
from benchmarks.output import main
from dynmo.balance.partition import Partition, exact, uniform
from dynmo.models.emulated import EmulatedLayer, mean_loss, precise_timers
from dynmo.models.model import Model, from_factories
from dynmo.pipeline.actions import Actions
from dynmo.runtime.comm.world import World
from dynmo.runtime.engine.batch_check import Inputs, Targets
from dynmo.runtime.engine.engine import Engine
from dynmo.runtime.engine.executor import SEND, WAIT, StepOutput
from dynmo.runtime.engine.options import StepOptions
from dynmo.runtime.layer.output_cache import Keys
from dynmo.schedule.catalogue import stage_ranks_of
from dynmo.schedule.op import Kind

SIDES = ("whole", "linear")
LAYERS = 4  # of an emulated rank. A W has as many parts.
SLOW = 1.4


class Jittery(EmulatedLayer):
    """An emulated layer whose times are others at every microbatch.

    Each layer draws in its own order, the same for both sides.
    """

    def __init__(self, f: float, b: float, w: float, size: int, spread: float, seed: int) -> None:
        super().__init__(f, b, w, size)
        self._even, self._spread, self._random = (f, b, w), spread, Random(seed)

    def forward(self, x: Tensor) -> Tensor:
        self.f, self.b, self.w = (
            seconds * self._random.lognormvariate(0, self._spread) for seconds in self._even
        )
        return super().forward(x)


def emulated_model(ranks: int, seconds: float, spread: float, slow: bool) -> Model:
    """Makes the emulated model."""
    precise_timers()
    times = [
        seconds / LAYERS * (SLOW if slow and i // LAYERS == ranks - 1 else 1)
        for i in range(ranks * LAYERS)
    ]
    factories = [
        partial(Jittery, t, t, t, MESSAGE_BYTES // 4, spread, i) for i, t in enumerate(times)
    ]
    return from_factories([f"emulated.{i}" for i in range(len(times))], factories, 0, mean_loss)


def waits(step_output: StepOutput) -> tuple[float, float, float]:
    """Sums the seconds of this rank by what they were spent on.

    Returns:
        Seconds in ops, seconds waited while there was W to run, and seconds of W that ran in a
        wait.
    """
    busy = fillable = filled = 0.0
    waiting = 0
    before = ""
    for kind, _, _, start, end in step_output.intervals:
        if kind == WAIT:
            fillable += (end - start) * (waiting > 0)
        elif kind != SEND:
            busy += end - start
            filled += (end - start) * (kind == Kind.W and before == WAIT)
            waiting += (kind == Kind.B) - (kind == Kind.W)
        before = kind
    return busy, fillable, filled


def compare(
    world: World, pipelines: dict[str, Engine], inputs: Tensor, targets: Tensor, rounds: int
) -> dict[str, Any]:
    """Times both sides in turn."""
    outcomes: dict[str, list[tuple[float, float, float]]] = {name: [] for name in SIDES}

    def seen(name: str, pipeline: Engine) -> Callable[[], float]:
        run = pipeline.forward_backward

        def recorded(
            step: int, inputs: Inputs, targets: Targets, keys: Keys | None = None
        ) -> StepOutput:
            step_output = run(step, inputs, targets, keys)
            outcomes[name].append(waits(step_output))
            return step_output

        pipeline.forward_backward = recorded
        return timed(world, pipeline, inputs, targets)

    times = alternate({name: seen(name, pipelines[name]) for name in SIDES}, rounds, warmup=2)
    seconds = {name: median(times[name]) for name in SIDES}
    table = torch.zeros(world.size, 3, dtype=torch.float64)
    for column, name in enumerate(("whole", "whole", "linear")):
        table[world.rank, column] = median(
            step_output[column] for step_output in outcomes[name][2:]
        )
    world.sum(table, "what ranks have waited")
    busy, fillable, filled = table.unbind(1)
    gains = sorted(a / b for a, b in zip(times["whole"], times["linear"], strict=True))
    return {
        "seconds": seconds,
        "gain": seconds["whole"] / seconds["linear"],
        "gain_quartiles": [gains[len(gains) // 4], gains[-1 - len(gains) // 4]],
        "limit": seconds["whole"] / float(busy.max()),
        "fillable": float(fillable.mean()) / seconds["whole"],
        "filled": float(filled.mean()) / seconds["linear"],
    }


def emulated(world: World, microbatches: int, milliseconds: int, rounds: int) -> dict[str, Any]:
    """Runs on each rank: emulated layers under several schedules."""
    batch = torch.zeros(microbatches, 1, 1, dtype=torch.int64)
    cases = {
        "zb-h1, random times": ("zb-h1", 0.5, False),
        "zb-v, random times": ("zb-v", 0.5, False),
        "zb-h1, one slow rank": ("zb-h1", 0.1, True),
        "zb-h1, ranks alike": ("zb-h1", 0.0, False),
        "1f1b, random times": ("1f1b", 0.5, False),
    }
    figures: dict[str, Any] = {}
    for case, (schedule, spread, slow) in cases.items():
        pipelines: dict[str, Engine] = {}
        for side in SIDES:
            model = emulated_model(world.size, milliseconds / 1000, spread, slow)
            cut = uniform(model.layers, len(stage_ranks_of(schedule, world.size)))
            pipelines[side] = Engine(
                world,
                model,
                cut,
                StepOptions(schedule, microbatches=microbatches, w_granularity=side),
            )
        figures[case] = compare(world, pipelines, batch, batch, rounds)
    return figures


def real(
    world: World, microbatches: int, rounds: int, blocks: int, hidden: int, sequence: int
) -> dict[str, Any]:
    """Runs on each rank: a GPT, cut evenly and unevenly."""
    model, inputs, targets = gpt(microbatches, blocks, hidden, sequence, micro_batch=4)

    def make(schedule: str) -> dict[str, Engine]:
        cut = uniform(model.layers, world.size)
        return {
            side: Engine(
                world,
                model,
                cut,
                StepOptions(schedule, microbatches=microbatches, w_granularity=side),
            )
            for side in SIDES
        }

    pipelines = make("zb-h1")
    if world.size == 1:
        return {"one rank": compare(world, pipelines, inputs, targets, rounds)}
    for _ in range(3):
        timed(world, pipelines["whole"], inputs, targets)()
    even = exact([cost.seconds for cost in pipelines["whole"].costs()], world.size)
    # The last rank gets a quarter of the first rank's layers too many.
    shift = even.counts[0] // 4
    uneven = Partition((even.counts[0] - shift, *even.counts[1:-1], even.counts[-1] + shift))
    figures: dict[str, Any] = {}
    for name, cut in (("zb-h1, even", even), ("zb-h1, uneven", uneven)):
        for pipeline in pipelines.values():
            Actions(pipeline).move(cut)
        figures[name] = compare(world, pipelines, inputs, targets, rounds) | {
            "layers_per_rank": list(cut.counts)
        }
    return figures


def measure(options: argparse.Namespace) -> dict[str, Any]:
    gpt = {
        "microbatches": 8,
        "rounds": options.real_rounds,
        "blocks": 8,
        "hidden": 256,
        "sequence": 128,
    }
    return {
        "emulated": run_ranks(
            "benchmarks.granularity:emulated",
            4,
            microbatches=12,
            milliseconds=options.milliseconds,
            rounds=options.rounds,
        ),
        "real": run_ranks("benchmarks.granularity:real", 1, **gpt)
        | run_ranks("benchmarks.granularity:real", 2, **gpt),
    }


if __name__ == "__main__":
    main(
        __doc__ or "",
        measure,
        [
            ("rounds", 9, "emulated rounds"),
            ("real_rounds", 9, "real rounds"),
            ("milliseconds", 10, "length of an emulated op"),
        ],
    )
