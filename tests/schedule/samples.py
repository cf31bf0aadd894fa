"""Schedules and costs at random, for properties that must hold for all of them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import strategies as st

from dynmo.cost.layer_cost import Costs, StageCost
from dynmo.schedule.op import Kind, Op, Schedule
from dynmo.schedule.simulator import peak_memory

TABLE_5: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "facts" / "zero_bubble_table5.json").read_text()
)["rows"]
"""The published cases: times, ranks, microbatches and bubble ratios."""


PUBLISHED = [
    pytest.param(
        row,
        id=f"{row['model']}-{row['ranks']}x{row['microbatches']}",
        marks=[pytest.mark.matrix] * (row["ranks"] * row["microbatches"] > 512),
    )
    for row in TABLE_5
]
"""The published cases as parameters of a test. The large ones are marked `matrix`."""


BY_HAND = ("1f1b", "gpipe", "zb-h1", "zb-h2")
"""Schedules of one stage a rank that costs do not shape."""


def from_text(text: str) -> Schedule:
    """Read the text that `str` writes of a schedule."""
    header, *lines = text.strip().splitlines()
    _, name, *parts = header.split()
    fields = dict(part.split("=") for part in parts)
    placement = tuple(map(int, fields["placement"].split(",")))
    rows: list[tuple[Op, ...]] = []
    for rank, line in enumerate(lines):
        cells = re.findall(r"(\d*)(BW|F|B|W)(\d+)", line.partition("|")[2])
        rows.append(
            tuple(
                Op(Kind(kind), int(stage) if stage else placement.index(rank), int(j))
                for stage, kind, j in cells
            )
        )
    credits = int(fields["credits"]) if "credits" in fields else None
    first = int(fields.get("first_trainable", 0))
    return Schedule(name, int(fields["microbatches"]), placement, tuple(rows), first, credits)


def times_of(row: dict[str, Any]) -> list[float]:
    """F, B, W and a message in milliseconds, and the share of the memory that W holds."""
    return [row[key] for key in ("t_f_ms", "t_b_ms", "t_w_ms", "t_comm_ms", "w_memory_share")]


def stage(f: float, b: float, w: float, activation: float, stash: float) -> StageCost:
    """The cost of a stage that holds an activation from F to B, and a stash from B to W."""
    return StageCost(f, b, w, activation, stash - activation, -stash)


def wander(
    placement: Sequence[int], microbatches: int, first_trainable: int, random: Random
) -> Schedule:
    """A valid schedule made by running any op that could run. A stage has BW, or B and W."""
    stages, ranks = len(placement), max(placement) + 1
    fused = [random.random() < 0.3 for _ in range(stages)]
    f, b, w = [0] * stages, [0] * stages, [0] * stages
    rows: list[list[Op]] = [[] for _ in range(ranks)]

    def ready() -> list[Op]:
        ops: list[Op] = []
        for s in range(stages):
            fed = s == 0 or f[s - 1] > f[s]
            # Written out here, not taken from dependencies(): forwards of a frozen stage may be
            # `ranks` ahead of the next stage's.
            held = s < first_trainable and f[s] >= f[s + 1] + ranks
            if f[s] < microbatches and fed and not held:
                ops.append(Op(Kind.F, s, f[s]))
            if s < first_trainable:
                continue
            if b[s] < f[s] and (s + 1 == stages or b[s + 1] > b[s]):
                ops.append(Op(Kind.BW if fused[s] else Kind.B, s, b[s]))
            if not fused[s] and w[s] < b[s]:
                ops.append(Op(Kind.W, s, w[s]))
        return ops

    while choices := ready():
        op = random.choice(choices)
        rows[placement[op.stage]].append(op)
        {Kind.F: f, Kind.B: b, Kind.BW: b, Kind.W: w}[op.kind][op.stage] += 1
    return Schedule(
        "wandered", microbatches, tuple(placement), tuple(map(tuple, rows)), first_trainable
    )


def with_time(costs: Costs) -> Costs:
    """No op of time 0, so that the clock tells ops apart."""
    stages = tuple(replace(s, f=s.f + 1, b=s.b + 1, w=s.w + 1) for s in costs.stages)
    return Costs(stages, costs.links)


def apart(schedule: Schedule) -> Schedule:
    """The schedule with B and W instead of BW."""

    def parts(op: Op) -> list[Op]:
        return [op._replace(kind=kind) for kind in (Kind.B, Kind.W)] if op.kind is Kind.BW else [op]

    return replace(
        schedule, ops=tuple(tuple(part for op in row for part in parts(op)) for row in schedule.ops)
    )


def fits(schedule: Schedule, costs: Costs, caps: Sequence[float]) -> bool:
    """True if no rank holds more than its cap, up to rounding."""
    peaks = peak_memory(schedule, costs)
    return all(peak <= cap * (1 + 1e-9) for peak, cap in zip(peaks, caps, strict=True))


@st.composite
def schedules(draw: st.DrawFn, several: bool = True) -> Schedule:
    """With `several`, a rank may have two chunks, looped or in a V."""
    ranks = draw(st.integers(1, 4))
    down = list(range(ranks))
    placement = draw(st.sampled_from([down, down + down, down + down[::-1]] if several else [down]))
    first_trainable = draw(st.integers(0, len(placement) - 1))
    return wander(
        placement, draw(st.integers(1, 5)), first_trainable, draw(st.randoms(use_true_random=False))
    )


@st.composite
def whole_costs(draw: st.DrawFn, stages: int, most: int = 9) -> Costs:
    """Whole numbers, so that every sum is exact."""
    times = st.integers(0, most)
    drawn: list[StageCost] = []
    for _ in range(stages):
        stash = draw(times)
        activation = stash + draw(times)
        drawn.append(stage(draw(times), draw(times), draw(times), activation, stash))
    return Costs(tuple(drawn), tuple(draw(times) for _ in range(stages - 1)))
