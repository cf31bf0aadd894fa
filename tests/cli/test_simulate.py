"""`dynmo simulate`: JSON, text, plot and refused input."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.cli.plans import answer
from tests.cli.runs import Base, Run, assert_refused

EXAMPLE = Path(__file__).parents[2] / "examples/workload.toml"

SMALL = """
steps = 40
ranks = 2
microbatches = 4
[layers]
weight_bytes = 1000
[[layers.moments]]
step = 0
f = [1, 1, 1, 1]
b = [1, 1, 1, 1]
w = [1, 1, 1, 1]
[[layers.moments]]
step = 20
f = [1, 1, 1, 1]
b = [0, 0, 1, 1]
w = [0, 0, 1, 1]
"""


@pytest.fixture
def run(dynmo: Run) -> Run:
    return partial(dynmo, "simulate")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


def test_example_workload_has_the_expected_speedup(run: Run) -> None:
    result = answer(run, EXAMPLE)
    total = result["total"]
    assert (result["name"], result["layers"], len(result["phases"])) == ("freezing", 48, 24)
    assert total["speedup"] == total["static_seconds"] / total["seconds"]
    assert 1.15 < total["speedup"] < total["perfect_speedup"] < total["bound"] == 6
    assert total["perfect_idle_ratio"] < total["idle_ratio"] < total["static_idle_ratio"]
    moves = sum(x["moved"] for x in result["rebalances"])
    assert total["rebalances"] == moves == sum(x["rebalances"] for x in result["phases"])
    assert total["moved_bytes"] == sum(x["moved_bytes"] for x in result["phases"]) > 0


def test_text_output(run: Run, small: Path) -> None:
    out = run(small).good
    lines = out.splitlines()
    size = "4 layers on 2 ranks, 4 microbatches of zb-h1, 40 steps"
    assert lines[0] == f"small: {size}; exact every 10 steps"
    assert any("20-39" in line and "3+1" in line for line in lines)
    (moves,) = [line for line in lines if line.startswith("    moves")]
    assert moves.index("|") - len("          +") == 30, "10 steps after the costs have changed"
    words = [line.split()[0] for line in lines[-5:]]
    assert words == ["policy", "static", "perfect", "bound", "simulated"]
    assert "bound    x2: whole layers over an even placement, ceil(4 / 2)" in lines
    assert "s" in out
    assert "*" in out


def test_markup_in_a_name_is_printed_literally(run: Run, small: Path) -> None:
    small.write_text('name = "[bold]small[/x]"\n' + SMALL)
    assert run(small).good.startswith("[bold]small[/x]: 4 layers")


def test_plot_is_an_svg_file(run: Run, small: Path) -> None:
    picture = small.with_suffix(".svg")
    assert answer(run, small, "--plot", picture)["steps"] == 40
    assert "<svg" in picture.read_text()


@pytest.mark.parametrize(
    ("change", "mentions"),
    [
        (("steps = 40", "step = 40"), ["'step'", "'steps'"]),
        (("ranks = 2", "ranks = 5"), ["5 ranks", "4"]),
        (("ranks = 2", 'ranks = 2\nschedule = "zb-h3"'), ["zb-h3"]),
        (
            ("microbatches = 4", 'microbatches = 5\nschedule = "interleaved-1f1b"'),
            ["5 microbatches", "2 ranks"],
        ),
        (("[layers]", '[policy]\nbalancer = "best"\n[layers]'), ["best"]),
        (("f = [1, 1, 1, 1]", "f = [1, 1, 1, nan]"), ["layers.moments[0].f[3] = nan"]),
        (("f = [1, 1, 1, 1]", "f = [1, 1, 1, 1"), ["small.toml", "TOML"]),
        (("ranks = 2", "ranks = 2\nmemory_limit = 1500"), ["1500"]),
    ],
)
def test_wrong_workload_is_refused(
    run: Run, small: Path, change: tuple[str, str], mentions: list[str]
) -> None:
    small.write_text(SMALL.replace(*change, 1))
    assert_refused(run(small), *mentions)


def test_wrong_paths_are_refused(run: Run, small: Path, tmp_path: Path) -> None:
    assert_refused(run(small, "--plot", "x.txt"), "--plot x.txt")
    nowhere = tmp_path / "none/x.svg"
    assert_refused(run(small, "--plot", nowhere), nowhere)
    assert_refused(run(tmp_path / "none.toml"), tmp_path / "none.toml")


def test_fewest_ranks_of_a_workload(run: Run, small: Path) -> None:
    needed = answer(run, small, "--fewest-ranks", "0.1")["ranks_needed"]
    assert [moment["ranks"] for moment in needed["moments"]] == [2, 2]
    assert needed["mean"] == 2.0
    assert "needs 1.0 of 2 ranks on average" in run(small, "--fewest-ranks", "1").out
    assert "ranks_needed" not in answer(run, small)


def test_decisions_of_a_run_are_the_same_again(base: Base, run: Run) -> None:
    """The run moved layers after half of them were frozen. Nothing of it is needed but the file."""
    path = base.folder / "runs/main/decisions.jsonl"
    told = answer(run, path)
    assert told["same"]
    assert {each["kind"] for each in told["decisions"]} == {"placement"}
    assert any(each["decided"]["change"] for each in told["decisions"])
    out = run(path).good
    assert "the same" in out
    assert "differs" not in out


def test_file_without_decisions_is_refused(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text("")
    assert_refused(run(path), "has no decisions")
