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
from typing import Any

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"
STYLE: Mapping[str, Any] = {
    "svg.fonttype": "none",  # text stays text
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
"""Settings of matplotlib for all pictures with a style of their own."""


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
    draw: Callable[[dict[str, Any], Path], object] | None = None,
) -> None:
    """Measures, or takes the figures of `--read`. Then draws and prints them."""
    options = parser.parse_args()
    if getattr(options, "read", None):
        result = json.loads(options.read.read_text())
    else:
        result = measure(options) | {"machine": machine()}
    if draw and options.plot:
        draw(result, options.plot)
    if options.json:
        print(json.dumps(result))
    else:
        show(result)


def parser_of(about: str | None, picture: str = "", reads: bool = False) -> argparse.ArgumentParser:
    """Returns a parser with the options that benchmarks share."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    if picture:
        text = f"draw it, like docs/pictures/{picture}.svg"
        parser.add_argument("--plot", type=Path, metavar="FILE", help=text)
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


def pyplot(style: Mapping[str, Any] = STYLE) -> Any:
    """Returns `matplotlib.pyplot`, which then draws the same figures as the same text."""
    import matplotlib as mpl

    mpl.use("svg")
    # The ids of a picture's parts depend on this salt alone.
    mpl.rcParams |= {"svg.hashsalt": "dynmo", **style}
    import matplotlib.pyplot as plt

    return plt


def save_picture(figure: Any, path: Path) -> None:
    """Saves a figure as SVG without a date, and closes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    pyplot({}).close(figure)
    # Matplotlib ends some lines with a space.
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")
