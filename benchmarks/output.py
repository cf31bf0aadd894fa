"""Command line, tables and pictures of the benchmarks.

A benchmark prints its figures as tables, or as one JSON object with `--json`. `--read` shows the
figures of an earlier `--json` instead of measuring. `benchmarks.harness` measures.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"
WIDTH = 7.2
"""Inches of a picture, which is as wide as a page's text. Its letters are then not made smaller."""
HATCHES = ("", "////", "....", "\\\\\\\\", "xxxx")
"""Of bars side by side, which then differ without colour."""
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "dynmo",  # the ids of a picture's parts depend on this salt alone
    "figure.constrained_layout.use": True,
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#dddddd",
    "hatch.linewidth": 0.8,
    "lines.linewidth": 1.3,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "legend.handlelength": 2.5,
}


# -- command line ----------------------------------------------------------------------------------


def main(
    about: str,
    measure: Callable[[argparse.Namespace], dict[str, Any]],
    options: Sequence[tuple[str, int, str]] = (),
) -> None:
    """Runs `python -m benchmarks.NAME [--json]` of a benchmark without tables of its own."""
    parser = parser_of(about)
    for name, default, text in options:
        add_number(parser, name, default, text)
    run(parser, measure, show)


def run(
    parser: argparse.ArgumentParser,
    measure: Callable[[argparse.Namespace], dict[str, Any]],
    show: Callable[[dict[str, Any]], object],
    draw: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> None:
    """Measures, or takes the figures of `--read`. Then draws and prints them.

    `draw` returns figures of matplotlib by the name of their picture. A module calls it `draw`.
    """
    options = parser.parse_args()
    if getattr(options, "read", None):
        result = json.loads(options.read.read_text())
    else:
        result = measure(options) | {"machine": machine()}
    if draw and options.plot:
        save_pictures(draw(result), options.plot)
    if options.json:
        print(json.dumps(result))
    else:
        show(result)


def parser_of(
    about: str | None, draws: bool = False, reads: bool = False
) -> argparse.ArgumentParser:
    """Returns a parser with the options that benchmarks share."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    if draws:
        text = "draw the pictures (default: of docs/pictures)"
        plot = {"nargs": "?", "const": PICTURES, "metavar": "FOLDER"}
        parser.add_argument("--plot", type=Path, help=text, **plot)
    if reads:
        text = "figures of an earlier --json, instead of measuring"
        parser.add_argument("--read", type=Path, metavar="FILE", help=text)
    return parser


def add_number(
    parser: argparse.ArgumentParser, name: str, default: float, text: str
) -> argparse.Action:
    """Adds an option that takes a number. Its help text names the default."""
    text = f"{text} (default {default})"
    return parser.add_argument(f"--{name}", type=type(default), default=default, help=text)


def machine() -> dict[str, Any]:
    """Describes the machine and the software, in kind."""
    import torch

    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def report(result: dict[str, Any], as_json: bool) -> None:
    print(json.dumps(result)) if as_json else show(result)


def show(result: dict[str, Any]) -> None:
    """Prints the figures of a benchmark without tables of its own."""
    from rich.console import Console
    from rich.pretty import Pretty

    Console().print(Pretty(result, expand_all=True))


# -- tables ----------------------------------------------------------------------------------------


def print_tables(tables: Mapping[str, str]) -> None:
    """Prints each table under its name."""
    for name, table in tables.items():
        print(f"{name}\n\n{table}\n")


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], align: str = "") -> str:
    """Formats a table in Markdown."""
    align = align or "l" + "r" * (len(head) - 1)
    rule = ["---:" if letter == "r" else "---" for letter in align]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))


# -- pictures --------------------------------------------------------------------------------------


def pyplot() -> Any:
    """Returns `matplotlib.pyplot`, which then draws the same figures as the same text."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update(_STYLE)
    import matplotlib.pyplot as plt

    return plt


def legend_above(figure: Any, columns: int) -> None:
    """Adds one legend of all panels above them."""
    entries: dict[str, Any] = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    figure.legend(entries.values(), entries.keys(), loc="outside upper center", ncols=columns)


def bars(
    axes: Any, groups: Sequence[str], sides: Mapping[str, tuple[str, Sequence[float]]]
) -> None:
    """Draws groups of bars side by side.

    Args:
        axes: The panel.
        groups: Name of each group. Lines of over 11 letters are broken.
        sides: For each side its colour and its height in each group.
    """
    step = 0.84 / len(sides)
    places = range(len(groups))
    for i, (name, (colour, heights)) in enumerate(sides.items()):
        x = [place + step * (i - (len(sides) - 1) / 2) for place in places]
        look = {"color": colour, "hatch": HATCHES[i], "edgecolor": "white"}
        axes.bar(x, heights, 0.95 * step, label=name, **look)
    axes.set_xticks(places, ["\n".join(fill(x, 11) for x in name.split("\n")) for name in groups])


def save_pictures(figures: Mapping[str, Any], folder: Path) -> None:
    """Saves figures as SVG without a date, and closes them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        path = folder / f"{name}.svg"
        figure.savefig(path, metadata={"Date": None})
        pyplot().close(figure)
        # Matplotlib ends some lines with a space.
        path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")
