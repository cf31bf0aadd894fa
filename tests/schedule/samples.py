"""Schedules and costs at random, for properties that must hold for all of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import strategies as st

from dynmo.cost.layer_cost import Costs, StageCost
from dynmo.schedule.op import Kind, Op, Schedule

TABLE_5: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "facts" / "zero_bubble_table5.json").read_text()
)["rows"]
"""The published cases: times, ranks, microbatches and bubble ratios."""


def _is_large(row: dict[str, Any]) -> bool:
    return row["ranks"] * row["microbatches"] > 512


PUBLISHED = [
    pytest.param(
        row,
        id=f"{row['model']}-{row['ranks']}x{row['microbatches']}",
        marks=[pytest.mark.matrix] * _is_large(row),
    )
    for row in TABLE_5
]
"""The published cases as parameters of a test. The large ones are marked `matrix`."""


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
        stash = draw(st.integers(0, most))
        activation = stash + draw(st.integers(0, most))
        drawn.append(
            StageCost(draw(times), draw(times), draw(times), activation, stash - activation, -stash)
        )
    return Costs(tuple(drawn), tuple(draw(times) for _ in range(stages - 1)))
