"""docs/reference/papers.md: every row has a result file, and no figure of ours is typed."""

from __future__ import annotations

import re
from importlib.util import find_spec

import pytest

from docs.tools.documents import ROOT
from docs.tools.remake import RUNS

pytestmark = pytest.mark.docs

PAGE = ROOT / "docs" / "reference" / "papers.md"
HEAD = ["in the paper", "its value", "dynmo", "how", "command", "why they differ"]
NAMES = re.compile(r"ZB-\w+|1F1B|b?float\d+")
MARK = re.compile(r"<!-- figure (\S+) .*?<!-- end -->")
KINDS = ("real", "emulated", "simulated", "measured")


def rows() -> list[list[str]]:
    found: list[list[str]] = []
    inside = False
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if cells == HEAD:
            inside = True
        elif not line.startswith("|"):
            inside = False
        elif inside and not line.startswith("| ---"):
            found.append(cells)
    return found


def test_page_has_the_rows() -> None:
    assert len(rows()) > 30


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_row_is_made_from_result_files(row: list[str]) -> None:
    assert len(row) == len(HEAD)
    _, value, ours, how, command, why = row
    files = set(MARK.findall(ours))
    assert files, "no figure"
    assert not re.search(r"\d", NAMES.sub("", MARK.sub("", ours))), "a figure is typed"
    assert how.startswith(KINDS)
    assert value
    assert why
    (name,) = re.findall(r"`benchmarks\.(\w+)`", command)
    assert find_spec(f"benchmarks.{name}")
    made = {run.path.name for run in RUNS if run.benchmark == name}
    assert all(file in made or file.startswith(f"{name}/") for file in files)


def test_every_result_file_of_a_benchmark_can_be_remade() -> None:
    files = {path.name for path in RUNS[0].path.parent.glob("*.json")}
    # No benchmarks: the random test (README has its command) and the film (docs/tools/film.py).
    assert files == {run.path.name for run in RUNS} | {"fuzz.json", "film.json"}
