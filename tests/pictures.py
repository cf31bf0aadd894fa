"""What makes a picture of matplotlib hard to read: each check returns one line per defect."""

from __future__ import annotations

from itertools import combinations
from typing import Any
from unittest.mock import patch

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.path import Path
from matplotlib.text import Text
from matplotlib.transforms import Affine2D, Bbox

COLUMN = 7.3
"""Width in inches that README.md and the pages of docs/ leave to a picture."""
LEAST_SIZE = 9.0
"""Points of the smallest text at the size at which it is shown."""
LEAST_CONTRAST = 0.15
"""Difference in lightness, from 0 to 1, that tells two entries of a legend apart without hue."""
_SLACK = 1.0  # pixels that the boxes of two texts may share


def overlaps(figure: Figure) -> list[str]:
    """Visible texts that overlap another one or leave the figure."""
    boxes = [(text.get_text(), _outline(text)) for text in _drawn_texts(figure)]
    page = Bbox.from_extents(*figure.bbox.extents).padded(_SLACK)
    found = [
        f"{name!r} leaves the figure"
        for name, box in boxes
        if not all(page.contains(*corner) for corner in np.asarray(box.vertices))
    ]
    for (name, box), (other_name, other) in combinations(boxes, 2):
        if box.intersects_path(other, filled=True):
            found.append(f"{name!r} overlaps {other_name!r}")
    return found


def covered_by_legend(figure: Figure) -> list[str]:
    """Legends that lie on lines, bars, areas, images or texts of a panel."""
    figure.draw_without_rendering()
    engine = figure.get_layout_engine()
    figure.set_layout_engine("none")  # all stays where it is while parts are hidden
    legends = [legend for legend in figure.findobj(Legend) if legend.get_visible()]
    boxes = [legend.get_window_extent() for legend in legends]
    found: list[str] = []
    with _Hidden(legends):
        whole = _pixels(figure)
        for axes in figure.axes:
            data = [*axes.lines, *axes.collections, *axes.patches, *axes.images, *axes.texts]
            with _Hidden(data):
                differs = (whole != _pixels(figure)).any(axis=2)
            for box in boxes:
                # Row 0 of the pixels is the top of the figure.
                left, bottom, right, top = (max(0, round(x)) for x in box.extents)
                rows = slice(max(0, len(differs) - top), max(0, len(differs) - bottom))
                if differs[rows, left:right].any():
                    found.append(f"a legend covers what is drawn in {_name(axes)!r}")
    figure.set_layout_engine(engine)
    return found


def too_small(figure: Figure, column: float = COLUMN) -> list[str]:
    """Texts below 9 points if the figure is shown `column` inches wide, or smaller if it is."""
    scale = min(1.0, column / figure.get_figwidth())
    sizes = {(text.get_text(), _points(text) * scale) for text in _drawn_texts(figure)}
    small = [(name, size) for name, size in sizes if size < LEAST_SIZE - 0.05]
    return sorted(f"{name!r} has {size:.1f} points" for name, size in small)


def alike_in_grey(figure: Figure) -> list[str]:
    """Pairs of a legend's entries that only their hue tells apart."""
    found: list[str] = []
    for legend in figure.findobj(Legend):
        names = [text.get_text() for text in legend.get_texts()]
        looks = [_look(handle) for handle in legend.legend_handles]
        for (name, look), (other_name, other) in combinations(zip(names, looks, strict=True), 2):
            if look[:-1] == other[:-1] and abs(look[-1] - other[-1]) < LEAST_CONTRAST:
                found.append(f"{name!r} looks like {other_name!r} in grey")
    return found


def defects(figure: Figure, column: float = COLUMN) -> list[str]:
    """All that the checks of this module find."""
    return [
        *overlaps(figure),
        *covered_by_legend(figure),
        *alike_in_grey(figure),
        *too_small(figure, column),
    ]


class _Hidden:
    """Hides artists for a while."""

    def __init__(self, artists: list[Any]) -> None:
        self._artists: list[Artist] = [artist for artist in artists if artist.get_visible()]

    def __enter__(self) -> None:
        for artist in self._artists:
            artist.set_visible(False)

    def __exit__(self, *_: object) -> None:
        for artist in self._artists:
            artist.set_visible(True)


def _drawn_texts(figure: Figure) -> list[Text]:
    """Texts that are drawn. Labels of ticks outside of a panel are not."""
    drawn: list[Text] = []
    draw = Text.draw

    def watched(text: Text, renderer: Any) -> None:
        if text.get_visible() and text.get_text().strip():
            drawn.append(text)
        draw(text, renderer)

    with patch.object(Text, "draw", watched):
        _pixels(figure)
    return list(dict.fromkeys(drawn))


def _look(handle: Any) -> tuple[Any, ...]:
    """The kind, shape, dashes or hatch of a legend's entry, and its lightness at last."""
    if isinstance(handle, Line2D):
        red, green, blue, alpha = to_rgba(handle.get_color(), handle.get_alpha())
        hollow = to_rgba(handle.get_markerfacecolor())[:3] == (1, 1, 1)
        shape = handle.get_marker(), handle.get_linestyle(), handle.get_linewidth(), hollow
    else:
        colour = handle.get_facecolor()
        red, green, blue, alpha = to_rgba(colour[0] if np.ndim(colour) == 2 else colour)
        shape = type(handle), handle.get_hatch()
    return *shape, 1 - alpha * (1 - (0.299 * red + 0.587 * green + 0.114 * blue))


def _points(text: Text) -> float:
    return text.get_fontproperties().get_size_in_points()


def _outline(text: Text) -> Path:
    """The rectangle around a text in pixels, turned as the text is."""
    turned = Text.get_window_extent(text)  # of an annotation without its arrow
    angle = text.get_rotation()
    text.set_rotation(0)
    flat = Text.get_window_extent(text)
    text.set_rotation(angle)
    size = np.array([flat.width - _SLACK, flat.height - _SLACK]) / 2
    corners = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1], [-1, -1]]) * size
    middle = (turned.x0 + turned.x1) / 2, (turned.y0 + turned.y1) / 2
    return Path(Affine2D().rotate_deg(angle).translate(*middle).transform(corners), closed=True)


def _pixels(figure: Figure) -> np.ndarray[Any, np.dtype[np.uint8]]:
    canvas = figure.canvas
    try:
        agg = FigureCanvasAgg(figure)
        agg.draw()
        return np.array(agg.buffer_rgba())
    finally:
        figure.set_canvas(canvas)


def _name(axes: Axes) -> str:
    return axes.get_title() or axes.get_ylabel() or axes.get_xlabel() or "a panel"
