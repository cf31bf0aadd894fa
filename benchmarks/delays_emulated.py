"""Ranks whose channels are slow: a moment of the early-exit trace, under several placements.

The processes' layers sleep as long as the trace says. A message to another node leaves its rank
after a delay that is drawn as in `benchmarks.delays`. The rank goes on meanwhile.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

from torch import Tensor

from benchmarks.cost_traces import trace
from benchmarks.delay_model import base_of, drawn, makespan, placements
from benchmarks.output import markdown
from benchmarks.traces_emulated import in_turn, sleeping_pipeline
from dynmo.plan.costs import pipeline_costs
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.comm.outbox import Outbox
from dynmo.schedule.catalogue import make
from dynmo.schedule.lowering import Channel

BLOCKS, MOMENT, DRAWS = 48, 18, 10
SIDES = ("static", "no links", "diffusion", "exact")


@contextmanager
def late(delay: Callable[[Channel], float]) -> Iterator[None]:
    """Holds every message of this rank back for so many seconds. A channel keeps its order."""
    due: WeakKeyDictionary[Outbox, deque[float]] = WeakKeyDictionary()
    put, send = Outbox.put, Outbox._send

    def put_late(
        self: Outbox, microbatch: int, tensors: tuple[Tensor, ...], ragged: bool = False
    ) -> None:
        due.setdefault(self, deque()).append(time.monotonic() + delay(self.channel))
        put(self, microbatch, tensors, ragged)

    def send_late(self: Outbox, *message: Any) -> None:
        time.sleep(max(0.0, due[self].popleft() - time.monotonic()))
        send(self, *message)

    with mock.patch.object(Outbox, "put", put_late), mock.patch.object(Outbox, "_send", send_late):
        yield


def emulate(
    world: Meeting, share: float, factors: Sequence[int], pairs: int, steps: int, shortest: float
) -> list[dict[str, Any]]:
    """Runs on each rank: the placements in turn, at each delay factor.

    Args:
        world: The ranks.
        share: Seconds of a message without delay, as a share of an even stage's F.
        factors: A message takes up to so many times as long.
        pairs: Number of turns of all placements.
        steps: Counted steps on a placement in each turn.
        shortest: Seconds that the shortest op sleeps.
    """
    return [_row(world, share, factor, pairs, steps, shortest) for factor in factors]


def _row(
    world: Meeting, share: float, factor: int, pairs: int, steps: int, shortest: float
) -> dict[str, Any]:
    ranks, layers = world.size, trace("early_exit", BLOCKS, 2048)[MOMENT]
    base = base_of("between nodes", share, BLOCKS, ranks)
    means = [seconds * (1 + factor) / 2 for seconds in base]
    placed = {name: x for name, x in placements(layers, means, ranks).items() if name in SIDES}
    costs = {name: pipeline_costs(layers, placement) for name, placement in placed.items()}
    ops = [x for own in costs.values() for y in own.stages for x in (y.f, y.b, y.w) if x]
    unit, draw = shortest / min(ops), random.Random(world.rank)
    pipeline = sleeping_pipeline(world, layers, unit, 1024, placed["static"])

    def delay(channel: Channel) -> float:
        return unit * base[channel.boundary] * drawn(draw, factor)

    with late(delay):
        times, _ = in_turn(world, {k: (pipeline, x) for k, x in placed.items()}, pairs, steps)
    schedule = make("zb-h1", ranks, 2 * ranks)
    simulated = {
        name: unit * fmean(makespan(schedule, layers, x, base, factor, i) for i in range(DRAWS))
        for name, x in placed.items()
    }
    return {
        "factor": factor,
        "base": share,
        "ranks": ranks,
        "seconds": times,
        "gain": {name: times["static"] / times[name] for name in SIDES},
        "simulated": simulated,
        "layers": {name: list(x.counts) for name, x in placed.items()},
    }


def emulated_table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the table in Markdown: speed-ups over static, measured and simulated."""
    first = rows[0]["seconds"]["static"]
    lines: list[list[str]] = []
    for x in rows:
        gains = [
            f"{x[key]['static'] / x[key][name]:.2f}"
            for name in SIDES[1:]
            for key in ("seconds", "simulated")
        ]
        takes = f"{x['seconds']['static'] / first:.2f}"
        lines.append([str(x["ranks"]), f"{x['base']:.0%} of F", str(x["factor"]), takes, *gains])
    head = ["ranks", "delays", "up to", "static takes"]
    head += [part for name in SIDES[1:] for part in (name, "simulated")]
    return markdown(head, lines)
