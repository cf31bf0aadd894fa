"""Draws a simulated timeline.

Each rank is a row, time runs to the right, and every op is at its place.

    0 |F0   F1   F2   ..........B0   W0   F3   B1   W1   B2   W2   B3   W3   |
    1 |.....F0   F1   .....B0   F2   B1   W0   F3   B2   W1   B3   W2   W3   |
    2 |..........F0   B0   F1   B1   F2   B2   W0   F3   B3   W1   W2   W3   |
      +---------+---------+---------+---------+---------+---------+----------
      0         2         4         6         8         10        12

A cell starts with the kind and the microbatch (`F3`, or `2F3` for stage 2 if a rank has several
stages). It lasts until the next cell or the first dot. Dots are idle time. A cell that is too
narrow omits the stage first, then the microbatch (X for a narrow BW). A small letter then stands
for the second of a rank's stages (or the fourth, ..), a capital for the first:

    0 |FFFfbwfbwFBWfbwBWfbBWBWw.|
    1 |.FfFfbwFBWfbwFBWfbBbBWwWw|

If many ops share a column, it shows the kind that fills more than half of it, or # for several
together.
"""

from __future__ import annotations

import math
import textwrap
from typing import TYPE_CHECKING

from dynmo.schedule.op import Kind, Op
from dynmo.schedule.simulator import Span, Timeline

if TYPE_CHECKING:
    from rich.text import Text

MIN_WIDTH = 32

IDLE, MIXED = ".", "#"
# Letter of a narrow op, meaning, and background.
_LOOKS = {
    Kind.F: ("F", "F forward", "cyan"),
    Kind.B: ("B", "B input gradient", "green"),
    Kind.W: ("W", "W weight gradient", "yellow"),
    Kind.BW: ("X", "BW both gradients", "magenta"),
}

# Ops with the same mark are drawn alike: a kind, on an even or an odd one of a rank's stages.
_Mark = tuple[Kind, bool]

# One column of a row: its character and its mark (None: idle or mixed).
_Column = tuple[str, _Mark | None]


def draw(timeline: Timeline, width: int = 120) -> Text:
    """Draw the picture in at most `width` columns, with a time axis and a legend.

    Each kind has a background colour.
    """
    from rich.text import Text

    assert width >= MIN_WIDTH, f"a grid has at least {MIN_WIDTH} columns"
    label = len(str(len(timeline.ranks) - 1))
    columns = width - label - 3
    scale = _scale(timeline, columns)
    origin = min(starts[0] for starts in timeline.starts)
    rows = [_row(row, origin, scale, columns) for row in timeline.ranks]
    used = max((i + 1 for row in rows for i, x in enumerate(row) if x != (IDLE, None)), default=0)
    text = Text(no_wrap=True, overflow="ignore")
    for rank, row in enumerate(rows):
        text.append(f"{rank:>{label}} |")
        for char, mark in row[:used]:
            style = mark and f"black on {_LOOKS[mark[0]][2]}{' italic' * mark[1]}"
            text.append(char, style)
        text.append("|\n")
    axis = _axis(timeline.makespan, scale, used) if timeline.makespan else []
    below = [" " * (label + 1) + line for line in axis]
    below += _legend(timeline, [row[:used] for row in rows], scale, width)
    return text.append("\n".join(below) + "\n")


def _scale(timeline: Timeline, columns: int) -> float:
    """Choose the columns per unit of time. The shortest op gets a whole number of them, if any."""
    if not timeline.makespan:
        return 0.0
    scale = columns / timeline.makespan
    shortest = min(
        span.end - span.start for row in timeline.ranks for span in row if span.end > span.start
    )
    whole = math.floor(shortest * scale + 1e-9)
    return min(scale, whole / shortest) if whole else scale


def _row(spans: tuple[Span, ...], origin: float, scale: float, columns: int) -> list[_Column]:
    # First fill each column by the shares of its ops, which is all that can be shown of ops
    # narrower than a column. Then draw the wider ops over it, with labels.
    stages = sorted({span.op.stage for span in spans})
    filled: list[dict[Kind, float]] = [{} for _ in range(columns)]
    placed = [(op, (start - origin) * scale, (end - origin) * scale) for op, start, end in spans]
    for op, left, right in placed:
        for column in range(int(left), min(columns, math.ceil(right))):
            share = min(right, column + 1) - max(left, column)
            filled[column][op.kind] = filled[column].get(op.kind, 0.0) + share
    row = [_column(shares) for shares in filled]
    for (op, begin, stop), span in zip(placed, spans, strict=True):
        left, right = _round(begin), min(columns, _round(stop))
        if (span.end - span.start) * scale > 1 - 1e-9 and left < right:
            odd = stages.index(op.stage) % 2 == 1
            cell = _cell(op, right - left, len(stages) > 1, odd)
            row[left:right] = [(char, (op.kind, odd)) for char in cell]
    return row


def _round(position: float) -> int:
    """Round to the nearest column, halves up.

    An op of at least one column then never vanishes. 1e-6 absorbs rounding errors of the clock.
    """
    return math.floor(position + 0.5 + 1e-6)


def _column(shares: dict[Kind, float]) -> _Column:
    kind = max(shares, key=lambda kind: shares[kind], default=Kind.F)
    if shares.get(kind, 0.0) > 0.5 + 1e-6:
        return _LOOKS[kind][0], (kind, False)
    return (MIXED, None) if sum(shares.values()) > 0.5 + 1e-6 else (IDLE, None)


def _cell(op: Op, width: int, several: bool, odd: bool) -> str:
    """Return the fullest label that fits, never "BW" without a number: it would read as two ops."""
    short, letter = f"{op.kind}{op.microbatch}", _LOOKS[op.kind][0]
    if odd:
        short, letter = short.lower(), letter.lower()
    # An op with two numbers can only be read with a space behind it.
    labels = (*[f"{op.stage}{op.kind}{op.microbatch} "] * several, short, letter)
    return next(label for label in labels if len(label) <= width).ljust(width)


def _axis(makespan: float, scale: float, used: int) -> list[str]:
    """Draw a ruler with a tick at round times, at least 10 columns apart, and the times below."""
    step = 10 / scale
    power = 10.0 ** math.floor(math.log10(step))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * (1 - 1e-9))
    ruler, times = ["-"] * (used + 1), ""
    for tick in range(math.floor(makespan / step + 1e-9) + 1):
        # The ruler's first character stands under the rows' bar. A tick therefore stands on the
        # left edge of its column.
        column = _round(tick * step * scale)
        text = f"{tick * step:g}"
        if column > used or column + len(text) > used + 1:
            break
        ruler[column] = "+"
        times = times.ljust(column) + text
    return ["".join(ruler), times]


def _legend(timeline: Timeline, rows: list[list[_Column]], scale: float, width: int) -> list[str]:
    kinds = {span.op.kind for row in timeline.ranks for span in row}
    shown = {char for row in rows for char, _ in row}
    two = max(len({span.op.stage for span in row}) for row in timeline.ranks) == 2
    upper = "the upper of a rank's stages" if two else "a rank's second, fourth, .. stage"
    notes = {
        "Xx": "X a narrow BW",
        "fbwx": f"small letters {upper}",
        MIXED: f"{MIXED} several ops in one column",
        IDLE: f"{IDLE} idle",
    }
    parts = [_LOOKS[kind][1] for kind in Kind if kind in kinds]
    parts += [note for chars, note in notes.items() if shown & {*chars}]
    if scale:
        parts.append(f"one column is {1 / scale:.4g}")
    return textwrap.wrap(", ".join(parts), width)
