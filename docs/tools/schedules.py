"""Draws six schedules below each other, as the simulator has them."""

from __future__ import annotations

import math
from typing import Any

from benchmarks.output import WIDTH, legend_above, pyplot
from dynmo.cost.layer_cost import split_costs, uniform_costs
from dynmo.report.schedule_figure import draw_timeline
from dynmo.schedule.catalogue import make, stage_ranks_of
from dynmo.schedule.simulator import Timeline, simulate

RANKS, MICROBATCHES = 4, 8
SHOWN = {
    "1f1b": math.inf,
    "interleaved-1f1b": math.inf,
    "zb-h1": math.inf,
    "zb-auto": 1.5 * RANKS,
    "zb-h2": math.inf,
    "zb-v": RANKS,
}
"""Schedules, and the most activations that a rank may keep."""


def timelines() -> dict[str, Timeline]:
    """The schedules where F, B and W take 1 each."""
    found: dict[str, Timeline] = {}
    for name, limit in SHOWN.items():
        costs = split_costs(uniform_costs(RANKS, 1, 1, 1), stage_ranks_of(name, RANKS))
        made = make(name, RANKS, MICROBATCHES, costs=costs, caps=(limit,) * RANKS)
        found[name] = simulate(made, costs)
    return found


def draw() -> dict[str, Any]:
    """Figures by the name of their picture."""
    shown = timelines()
    figure, panels = pyplot().subplots(len(shown), figsize=(WIDTH, 9.2), sharex=True)
    until = max(timeline.makespan for timeline in shown.values())
    for axes, (name, timeline) in zip(panels, shown.items(), strict=True):
        draw_timeline(axes, timeline, until)
        axes.grid(visible=False)
        bubble, memory = timeline.bubble_ratio, max(timeline.peak_memory)
        axes.set_title(f"{name}: bubble {bubble:.0%}, memory {memory:g}", loc="left")
    panels[-1].set_xlabel("time")
    legend_above(figure, 3)
    return {"schedules": figure}
