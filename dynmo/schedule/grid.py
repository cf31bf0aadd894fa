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

from dynmo.errors import InputError
from dynmo.schedule.op import Kind, Op
from dynmo.schedule.simulator import Span, Timeline

if TYPE_CHECKING:
    from rich.text import Text

MIN_WIDTH = 32

IDLE, MIXED = ".", "#"
_LETTER = {Kind.F: "F", Kind.B: "B", Kind.W: "W", Kind.BW: "X"}
_MEANING = {
    Kind.F: "F forward",
    Kind.B: "B input gradient",
    Kind.W: "W weight gradient",
    Kind.BW: "BW both gradients",
}
_STYLE = {
    Kind.F: "black on cyan",
    Kind.B: "black on green",
    Kind.W: "black on yellow",
    Kind.BW: "black on magenta",
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

    if width < MIN_WIDTH:
        raise InputError(f"a grid of {width} columns; at least {MIN_WIDTH} are needed")
    label = len(str(len(timeline.ranks) - 1))
    columns = width - label - 3
    scale = _scale(timeline, columns)
    origin = min(starts[0] for starts in timeline.starts)
    rows = [_row(row, origin, scale, columns) for row in timeline.ranks]
    used = max(
        max((i + 1 for i, x in enumerate(row) if x != (IDLE, None)), default=0) for row in rows
    )
    text = Text(no_wrap=True, overflow="ignore")
    for rank, row in enumerate(rows):
        text.append(f"{rank:>{label}} |")
        for char, mark in row[:used]:
            text.append(char, None if mark is None else _STYLE[mark[0]] + " italic" * mark[1])
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
    odd = {stage: bool(chunk % 2) for chunk, stage in enumerate(stages)}
    filled: list[dict[Kind, float]] = [{} for _ in range(columns)]
    for op, start, end in spans:
        left, right = (start - origin) * scale, (end - origin) * scale
        for column in range(int(left), min(columns, math.ceil(right))):
            share = min(right, column + 1) - max(left, column)
            filled[column][op.kind] = filled[column].get(op.kind, 0.0) + share
    row = [_column(shares) for shares in filled]
    for op, start, end in spans:
        left, right = _round((start - origin) * scale), min(columns, _round((end - origin) * scale))
        if (end - start) * scale > 1 - 1e-9 and left < right:
            mark = op.kind, odd[op.stage]
            row[left:right] = [
                (char, mark) for char in _cell(op, right - left, len(stages) > 1, odd[op.stage])
            ]
    return row


def _round(position: float) -> int:
    """Round to the nearest column, halves up.

    An op of at least one column then never vanishes. 1e-6 absorbs rounding errors of the clock.
    """
    return math.floor(position + 0.5 + 1e-6)


def _column(shares: dict[Kind, float]) -> _Column:
    kind = max(shares, key=lambda kind: shares[kind], default=Kind.F)
    if shares.get(kind, 0.0) > 0.5 + 1e-6:
        return _LETTER[kind], (kind, False)
    return (MIXED, None) if sum(shares.values()) > 0.5 + 1e-6 else (IDLE, None)


def _letter(mark: _Mark) -> str:
    kind, odd = mark
    return _LETTER[kind].lower() if odd else _LETTER[kind]


def _cell(op: Op, width: int, several: bool, odd: bool) -> str:
    """Return the fullest label that fits, never "BW" without a number: it would read as two ops."""
    short = f"{op.kind.lower() if odd else op.kind}{op.microbatch}"
    # An op with two numbers can only be read with a space behind it.
    labels = (f"{op.stage}{op.kind}{op.microbatch} ", short) if several else (short,)
    return next((label for label in labels if len(label) <= width), _letter((op.kind, odd))).ljust(
        width
    )


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
    parts = [_MEANING[kind] for kind in Kind if kind in kinds]
    if shown & {_LETTER[Kind.BW], _LETTER[Kind.BW].lower()}:
        parts.append(f"{_LETTER[Kind.BW]} a narrow BW")
    if any(char.islower() for char in shown):
        chunks = max(len({span.op.stage for span in row}) for row in timeline.ranks)
        parts.append(
            "small letters the upper of a rank's stages"
            if chunks == 2
            else "small letters a rank's second, fourth, .. stage"
        )
    if MIXED in shown:
        parts.append(f"{MIXED} several ops in one column")
    if IDLE in shown:
        parts.append(f"{IDLE} idle")
    if scale:
        parts.append(f"one column is {1 / scale:.4g}")
    return textwrap.wrap(", ".join(parts), width)
