"""Draws docs/pictures anew from benchmarks/results and from runs of the code.

python -m docs.tools.pictures [SOURCE ...]
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from benchmarks.output import PICTURES, save_pictures
from docs.tools import balancing, film, schedules
from docs.tools.figures import result_of
from docs.tools.remake import RUNS

_BENCHMARKS = {run.path.stem: run.benchmark for run in RUNS if run.draws}
_RUNS = {"balancing": balancing.draw, "schedules": schedules.draw}
SOURCES = (*_BENCHMARKS, *_RUNS)
"""Result files, and what draws without one."""


def draw(source: str) -> dict[str, Any]:
    """Figures of a source, by the name of their picture."""
    if source in _RUNS:
        return _RUNS[source]()
    return import_module(f"benchmarks.{_BENCHMARKS[source]}").draw(result_of(f"{source}.json"))


if __name__ == "__main__":
    for source in sys.argv[1:] or (*SOURCES, "film"):
        if source == "film":
            (PICTURES / "film.svg").write_text(film.draw())
        else:
            save_pictures(draw(source), PICTURES)
