"""Unequal ranks: layers leave a slow rank, against the best that the simulator knows.

Emulated: layers sleep on 4 ranks. On a rank of speed 0.5 they sleep twice as long. In "constant"
the third rank is slow from the start. In "changing" the second becomes slow in the middle of the
run. Nobody tells the run: it measures the speeds.

Real: a GPT on 2 ranks. The second is stopped and continued by signals, half of the time.

Each begins with an even placement and `every = "auto"`. `even_seconds` are those of a step before
the layers move, and `reached_seconds` those at the end. `best_seconds` are the simulator's for the
best placement at the true costs and speeds. In "real" the costs are those that the run measured.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Any

import torch

import dynmo
from benchmarks import harness
from benchmarks.output import main, markdown
from dynmo.change_events import RebalanceEvent, SpeedsEvent
from dynmo.events import Event, StepResult
from dynmo.models.emulated import Pace, make_layers
from dynmo.models.model import Model
from dynmo.plan.placement import place
from dynmo.plan.problem import Problem, Work
from dynmo.runtime.comm.meeting import Meeting
from dynmo.schedule.bounds import Objective

LAYERS = 24
MICROBATCHES = 8
SCHEDULE = "zb-h1"

# Stops and continues another process until its own input ends.
_STOPPER = f"""
import os, select, sys, time
process, period = int(sys.argv[1]), float(sys.argv[2])
while not select.select([sys.stdin], [], [], period)[0] and os.getppid() == process:
    os.kill(process, {int(signal.SIGSTOP)})
    time.sleep(period)
    os.kill(process, {int(signal.SIGCONT)})
"""


def emulated(
    world: Meeting,
    speeds: list[float],
    steps: int,
    milliseconds: float,
    later: list[float] | None = None,
) -> dict[str, Any]:
    """Runs on each rank: layers that sleep, and a speed for each rank.

    `later` are the speeds from the middle of the run on.
    """
    pace = Pace(speeds[world.rank])
    seconds = [milliseconds / 1000] * LAYERS
    model = make_layers(seconds, seconds, seconds, size=1024, pace=pace)
    run = _Run(model, world, torch.zeros(MICROBATCHES, 1, dtype=torch.int64))
    run.train(steps)
    if later is not None:
        run.begin_again()
        pace.speed = later[world.rank]
        run.train(steps)
    return run.figures(tuple(later or speeds), milliseconds / 1000)


def stopped(
    world: Meeting, steps: int, hidden: int, blocks: int, milliseconds: int
) -> dict[str, Any]:
    """Runs on each rank: a GPT whose last rank is stopped half of the time."""
    options = dynmo.ModelOptions(
        kind="gpt", blocks=blocks, hidden=hidden, heads=4, vocab=64, sequence=128
    )
    tokens = torch.randint(64, (2 * MICROBATCHES, 129), generator=torch.Generator().manual_seed(0))
    run = _Run(dynmo.load_model(options), world, tokens[:, :-1], tokens[:, 1:])
    slow = world.size - 1
    with _stopping(milliseconds / 1000 if world.rank == slow else None):
        run.train(steps)
    return run.figures((1.0,) * slow + (0.5,))


@contextmanager
def _stopping(period: float | None) -> Generator[None]:
    """Stops this process for each second period meanwhile. None: never."""
    if period is None:
        yield
        return
    command = [sys.executable, "-c", _STOPPER, str(os.getpid()), str(period)]
    stopper = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        yield
    finally:
        stopper.communicate()


class _Run:
    """A training that balances itself, and its figures."""

    def __init__(
        self,
        model: Model,
        world: Meeting,
        inputs: torch.Tensor,
        targets: torch.Tensor | None = None,
    ) -> None:
        self._batch = inputs, inputs if targets is None else targets
        self._events: list[Event] = []
        self._first = 0  # of the steps since the speeds changed
        self.pipeline = dynmo.Pipeline(
            model,
            world,
            microbatches=MICROBATCHES,
            schedule=SCHEDULE,
            optimizer=dynmo.SGD(lr=0.0, momentum=0.9),
            steps=10_000,
            log=dynmo.Log(listen=self._events.append),
        )

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.pipeline.step(*self._batch)

    def begin_again(self) -> None:
        self._first = sum(isinstance(event, StepResult) for event in self._events)

    def figures(self, speeds: tuple[float, ...], seconds: float | None = None) -> dict[str, Any]:
        """Returns the figures of the steps since the speeds were these.

        Args:
            speeds: Speed of each rank.
            seconds: True seconds of F, B and W of each layer. None: the measured ones.
        """
        events = [event for event in self._events if event.step >= self._first]
        steps = [event for event in events if isinstance(event, StepResult)]
        moves = [event for event in events if isinstance(event, RebalanceEvent)]
        told = [event for event in events if isinstance(event, SpeedsEvent)]
        moved = moves[0].step if moves else steps[-1].step
        # The first step opens channels.
        even = [x.seconds for x in steps if x.step < moved][1:] or [steps[0].seconds]
        settled = [x.seconds for x in steps if not moves or x.step > moves[-1].step]
        profile = self.pipeline.measured.profile()
        if seconds is not None:
            layers = tuple(replace(x, f=seconds, b=seconds, w=seconds) for x in profile.layers)
            profile = replace(profile, layers=layers)
        problem = Problem(profile, Work(Objective.MAKESPAN), speeds=speeds)
        best = place(problem, problem.mesh(len(speeds), MICROBATCHES, SCHEDULE))
        reached = median(settled[-max(1, len(settled) // 2) :])
        return {
            "even_seconds": median(even),
            "reached_seconds": reached,
            "best_seconds": best.step,
            "share_of_best": best.step / reached,
            "over_even": median(even) / reached,
            "speeds": list(speeds),
            "measured_speeds": list(told[-1].speeds) if told else [1.0] * len(speeds),
            "moved_after_steps": moved - self._first,
            "moves": len(moves),
            "layers": list(self.pipeline.mesh.partition.counts),
            "best_layers": list(best.partition.counts),
        }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    slow, late = [1.0, 1.0, 0.5, 1.0], [1.0, 0.5, 1.0, 1.0]
    each = {"steps": options.steps, "milliseconds": options.microseconds / 1000}
    rows = {
        "constant": harness.run_ranks("benchmarks.unequal:emulated", 4, speeds=slow, **each),
        "changing": harness.run_ranks(
            "benchmarks.unequal:emulated", 4, speeds=[1.0] * 4, later=late, **each
        ),
        "stopped": harness.run_ranks(
            "benchmarks.unequal:stopped",
            2,
            steps=options.real_steps,
            hidden=options.hidden,
            blocks=options.blocks,
            milliseconds=options.period,
        ),
    }
    return {"least_share_of_best": min(row["share_of_best"] for row in rows.values()), **rows}


def table(result: dict[str, Any]) -> str:
    rows = [
        [
            name,
            ", ".join(f"{speed:g}" for speed in row["speeds"]),
            ", ".join(f"{speed:g}" for speed in row["measured_speeds"]),
            f"{row['over_even']:.2f}",
            f"{row['share_of_best']:.1%}",
            str(row["moves"]),
        ]
        for name, row in result.items()
        if isinstance(row, dict) and "moves" in row
    ]
    return markdown(["run", "speeds", "measured", "over even", "share of best", "moves"], rows)


if __name__ == "__main__":
    main(
        __doc__ or "",
        measure,
        [
            ("steps", 24, "emulated steps at each set of speeds"),
            ("microseconds", 10000, "of an emulated layer's F, B or W"),
            ("real_steps", 60, "of the GPT"),
            ("hidden", 256, "of the GPT"),
            ("blocks", 6, "of the GPT"),
            ("period", 1, "milliseconds for which the rank is stopped, and then runs"),
        ],
    )
