"""Draws the pictures of docs/how-a-balancer-decides.md, each from a run of the code."""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from unittest.mock import patch

from benchmarks.lemmas import bound
from benchmarks.output import WIDTH, legend_above, pyplot
from dynmo.cost.layer_cost import LayerCost
from dynmo.plan.balancers import diffuse
from dynmo.plan.bisection import Chain, exact
from dynmo.plan.costs import pipeline_costs
from dynmo.plan.partition import Partition
from dynmo.plan.pays import Change, Interval, pays
from dynmo.report.schedule_figure import draw_timeline
from dynmo.schedule.catalogue import make
from dynmo.schedule.simulator import Timeline, simulate

GREY, RED, BLUE, SKY = "#999999", "#d55e00", "#0072b2", "#56b4e9"
WEIGHTS = [4.0, 2.0, 3.0, 3.0, 1.0, 2.0, 1.0, 1.0, 2.0, 3.0, 1.0, 1.0]
RANKS = 4
SLOPE = [1.0] * 36
START = Partition((10, 8, 6, 4, 3, 2, 2, 1))
HEAVY = (LayerCost(5.0, 5.0, 5.0), *(LayerCost(1.0, 1.0, 1.0) for _ in range(7)))
TIED = (Partition((1, 2, 5)), Partition((1, 3, 4)))
STEP, MOVE, MARGIN, HYSTERESIS = 1.0, 2.0, 1.0, 0.02


def partition() -> Any:
    """Draws the prefix sums with their cuts, and the bottlenecks that were tried."""
    chain = Chain(WEIGHTS, RANKS)
    probe, tried = chain.probe, list[tuple[float, bool]]()

    def watched(bottleneck: float) -> tuple[bool, float]:
        feasible, value = probe(bottleneck)
        tried.append((bottleneck, feasible))
        return feasible, value

    with patch.object(chain, "probe", watched):
        least = chain.least()
    bounds = exact(WEIGHTS, RANKS).bounds
    sums = chain.sums.tolist()
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(WIDTH, 3))
    left.step(range(len(sums)), sums, where="post", color=GREY)
    for stage, (start, stop) in enumerate(pairwise(bounds)):
        left.fill_between([start, stop], sums[start], sums[stop], color=SKY, alpha=0.35)
        load = f"stage {stage}: {sums[stop] - sums[start]}"
        below = {"xytext": (3, -3), "textcoords": "offset points", "va": "top"}
        left.annotate(load, (start, sums[start]), **below)
    left.set(title="prefix sums and cuts", xlabel="layer", ylabel="sum of the loads before it")
    left.set_ylim(-3, sums[-1] * 1.1)
    for trial, (bottleneck, feasible) in enumerate(tried, start=1):
        colour, marker = (BLUE, "o") if feasible else (RED, "x")
        right.plot(trial, bottleneck, marker, color=colour)
    right.plot([], [], "o", color=BLUE, label=f"enough for {RANKS} stages")
    right.plot([], [], "x", color=RED, label="too little")
    right.axhline(least, color=BLUE, linewidth=0.8, linestyle="--", label=f"the least: {least:g}")
    right.set(title="bisection of the bottleneck", xlabel="trial", ylabel="bottleneck tried")
    right.set_xticks(range(1, len(tried) + 1))
    right.legend()
    return figure


def diffusion() -> Any:
    """Draws the loads of the stages and the flows over the boundaries, round by round."""
    shown = diffuse(SLOPE, START)
    mean = len(SLOPE) / START.stages
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(WIDTH, 3))
    for turn, placement in enumerate(shown):
        share = turn / (len(shown) - 1)
        colour = (0.84 * (1 - share), 0.37 + 0.08 * share, 0.7 * share)
        name = {0: "start", len(shown) - 1: f"after {len(shown) - 1} rounds"}.get(turn)
        marker = "o" if turn else "s"
        left.plot(placement.counts, color=colour, marker=marker, markersize=3, label=name)
        flows = [stop - i * mean for i, stop in enumerate(placement.bounds)][1:-1]
        right.plot(range(1, START.stages), flows, color=colour, marker=marker, markersize=3)
    left.axhline(mean, color=GREY, linewidth=0.8, linestyle="--", label="mean")
    right.axhline(0, color=GREY, linewidth=0.8, linestyle="--")
    limit = bound(START.stages, len(SLOPE))
    left.set(title="loads", xlabel="stage", ylabel="layers")
    right.set(title=f"flows (lemma 2: {limit:.0f} rounds)", xlabel="boundary", ylabel="layers")
    left.legend()
    return figure


def timelines() -> list[Timeline]:
    schedule = make("1f1b", 3, 4)
    return [simulate(schedule, pipeline_costs(HEAVY, placement)) for placement in TIED]


def schedule_aware() -> Any:
    """Draws the timelines of two placements of the same bottleneck."""
    drawn = timelines()
    figure, panels = pyplot().subplots(2, 1, figsize=(WIDTH, 3.6), sharex=True)
    until = max(timeline.makespan for timeline in drawn)
    for axes, placement, timeline in zip(panels, TIED, drawn, strict=True):
        draw_timeline(axes, timeline, until)
        axes.grid(visible=False)
        counts = "+".join(map(str, placement.counts))
        axes.set_title(f"{counts} layers: {timeline.span:g}")
    panels[-1].set_xlabel("time")
    legend_above(figure, 2)
    return figure


def benefit() -> Any:
    """Draws the gain against the cost, and which moves are made."""
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(WIDTH, 3.2))
    steps = range(0, 201, 2)
    for gain, colour, dashes in ((0.01, GREY, ":"), (0.03, SKY, "-."), (0.1, BLUE, "-")):
        saved = [gain * STEP * n for n in steps]
        left.plot(steps, saved, dashes, color=colour, label=f"a gain of {gain:.0%}")
    left.axhline(MOVE * MARGIN, color=RED, linestyle="--", label="cost of the move x margin")
    left.set(title="seconds saved", xlabel="steps left", ylabel="seconds", ylim=(0, 10))
    least = [100 * _least_gain(n) for n in steps]
    right.fill_between(steps, least, 100, color=SKY, alpha=0.35)
    right.axhline(100 * HYSTERESIS, color="black", linestyle=(0, (1, 3)), label="hysteresis")
    right.text(120, 6, "move")
    right.text(15, 0.7, "stay")
    right.set(
        title="what is decided", xlabel="steps left", ylabel="gain of a step, %", ylim=(0, 10)
    )
    legend_above(figure, 3)
    return figure


def _least_gain(steps: int) -> float:
    """Returns the least gain for which layers move."""
    gains = (i / 1000 for i in range(1, 1000))
    return next((x for x in gains if _decide(x, steps)), 1.0)


def _decide(gain: float, steps: int) -> bool:
    change = Change(MOVE, MOVE, MARGIN, HYSTERESIS)
    then = STEP, STEP * (1 - gain)
    return pays(change, [Interval(0, steps, ())], lambda _: then).pays


def draw() -> dict[str, Any]:
    """Figures by the name of their picture."""
    return {
        "balancer_partition": partition(),
        "balancer_diffusion": diffusion(),
        "balancer_schedule": schedule_aware(),
        "balancer_benefit": benefit(),
    }
