"""Draws what the simulator says of a schedule."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dynmo.report.passes import draw_rows, rows_of
from dynmo.schedule.simulator import Timeline


def draw_timeline(axes: Axes, timeline: Timeline, until: float) -> None:
    """Draws the passes of each rank. Those of its later stages have a black edge below."""
    draw_rows(axes, rows_of(timeline), until)
    later = [
        (rank, span.start, span.end - span.start)
        for rank, row in enumerate(timeline.ranks)
        for span in row
        if span.op.stage >= len(timeline.ranks)
    ]
    if later:
        ranks, starts, lengths = zip(*later, strict=True)
        bottoms = [rank + 0.34 for rank in ranks]
        axes.barh(
            bottoms,
            lengths,
            0.12,
            left=starts,
            align="edge",
            color="black",
            edgecolor="white",
            hatch="||||",
            linewidth=0,
            label="later stage of a rank",
        )


def timeline_figure(timeline: Timeline) -> Figure:
    """Draws one schedule, in the width that its ops need."""
    rows = timeline.ranks
    width = min(4 + 0.2 * max(map(len, rows)), 40)
    figure = Figure(figsize=(width, 1.5 + 0.4 * len(rows)), layout="constrained")
    axes = figure.subplots()
    draw_timeline(axes, timeline, timeline.makespan)
    axes.set_xlabel("time")
    handles, names = axes.get_legend_handles_labels()
    once = dict(zip(names, handles, strict=True))
    figure.legend(once.values(), once.keys(), loc="outside upper center", ncols=4, frameon=False)
    return figure
