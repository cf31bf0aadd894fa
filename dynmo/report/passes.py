"""Draws the passes of ranks as bars on the clock: measured ones, and those of a schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes

from dynmo.report.run_record import RunRecord, Span
from dynmo.schedule.simulator import Timeline

COLOURS = {"F": "#9ecbef", "B": "#1f5f99", "W": "#57a773", "BW": "#0b302e"}
_HATCHES = {"W": "////"}
_NAMES = {"F": "F", "B": "B", "W": "W", "BW": "B and W in one"}
_LABELLED = 0.012  # share of the width from which on a pass has its number

Row = list[tuple[str, int, float, float]]
"""Passes of a rank: kind, microbatch, begin and end in seconds."""


def traced_rows(run: RunRecord) -> tuple[int, list[Row], list[Row]] | None:
    """Returns the last step that the trace has: its passes as measured, and as planned."""
    steps = [span.args.step for span in run.trace if span.cat in COLOURS]
    if not steps:
        return None
    step = max(steps)
    spans = [span for span in run.trace if span.args.step == step]
    return step, _rows(spans, ""), _rows(spans, "planned ")


def _rows(spans: Sequence[Span], before: str) -> list[Row]:
    """Returns the passes of each rank, of the kinds whose category begins with a word."""
    kinds = {f"{before}{kind}": kind for kind in COLOURS}
    spans = [span for span in spans if span.cat in kinds]
    origin = min((span.ts for span in spans), default=0.0)
    ranks = sorted({span.tid for span in spans})
    rows: list[Row] = [[] for _ in ranks]
    for span in spans:
        begin = (span.ts - origin) / 1e6
        row = rows[ranks.index(span.tid)]
        row.append((kinds[span.cat], span.args.microbatch, begin, begin + span.dur / 1e6))
    return rows


def rows_of(timeline: Timeline) -> list[Row]:
    """Returns the passes of each rank as the simulator has them."""
    return [
        [(span.op.kind.name, span.op.microbatch, span.start, span.end) for span in rank]
        for rank in timeline.ranks
    ]


def draw_rows(axes: Axes, rows: Sequence[Row], until: float, numbers: bool = True) -> None:
    """Draws passes as bars, a row for each rank, with the numbers of their microbatches."""
    for rank, row in enumerate(rows):
        for kind in COLOURS:
            bars = [(begin, end - begin) for each, _, begin, end in row if each == kind]
            if bars:
                axes.broken_barh(
                    bars,
                    (rank - 0.4, 0.8),
                    facecolor=COLOURS[kind],
                    edgecolor="white",
                    hatch=_HATCHES.get(kind),
                    linewidth=0.4,
                    label=_NAMES[kind],
                )
        for kind, number, begin, end in row if numbers else ():
            if end - begin > _LABELLED * (1 + (number > 9)) * until:
                dark = kind in ("B", "BW")
                axes.text(
                    (begin + end) / 2,
                    rank,
                    str(number),
                    ha="center",
                    va="center",
                    size=9,
                    color="white" if dark else "black",
                )
    axes.set_xlim(0, until)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks(range(0, len(rows), math.ceil(len(rows) / 8)))
    axes.set_ylabel("rank")
