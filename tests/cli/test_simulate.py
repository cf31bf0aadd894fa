from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dynmo.cli import main

EXAMPLE = Path(__file__).parents[2] / "examples/workload.toml"
Run = Callable[..., tuple[int, str, str]]

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
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command line in this process: exit status, stdout, stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        status = main(["simulate", *map(str, arguments)])
        out = capsys.readouterr()
        return status, out.out, out.err

    return call


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


def test_the_example(run: Run) -> None:
    status, out, err = run(EXAMPLE, "--json")
    assert (status, err) == (0, "")
    assert out.count("\n") == 1
    result = json.loads(out)
    total = result["total"]
    assert (result["name"], result["layers"], len(result["phases"])) == ("freezing", 48, 24)
    assert total["speedup"] == total["static_seconds"] / total["seconds"]
    assert 1.15 < total["speedup"] < total["perfect_speedup"] < total["bound"] == 6
    assert total["perfect_idle_ratio"] < total["idle_ratio"] < total["static_idle_ratio"]
    assert (
        total["rebalances"]
        == sum(x["moved"] for x in result["rebalances"])
        == sum(x["rebalances"] for x in result["phases"])
    )
    assert total["moved_bytes"] == sum(x["moved_bytes"] for x in result["phases"]) > 0


def test_the_text(run: Run, small: Path) -> None:
    status, out, err = run(small)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert (
        lines[0]
        == "small: 4 layers on 2 ranks, 4 microbatches of zb-h1, 40 steps; exact every 10 steps"
    )
    assert any("20-39" in line and "3+1" in line for line in lines)
    (moves,) = [line for line in lines if line.startswith("    moves")]
    assert moves.index("|") - len("          +") == 30, (
        "the costs change at step 20, and step 30 knows"
    )
    assert [line.split()[0] for line in lines[-5:]] == [
        "policy",
        "static",
        "perfect",
        "bound",
        "simulated",
    ]
    assert "bound    x2: whole layers over an even placement, ceil(4 / 2)" in lines
    assert "s" in out
    assert "*" in out


def test_a_name_is_no_markup(run: Run, small: Path) -> None:
    small.write_text('name = "[bold]small[/x]"\n' + SMALL.replace('name = "small"\n', ""))
    status, out, err = run(small)
    assert (status, err) == (0, "")
    assert out.startswith("[bold]small[/x]: 4 layers")


def test_the_plot(run: Run, small: Path) -> None:
    picture = small.with_suffix(".svg")
    status, out, _ = run(small, "--plot", picture, "--json")
    assert status == 0
    assert json.loads(out)["steps"] == 40
    assert "<svg" in picture.read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("steps = 40", "step = 40"), "unknown key 'step'; did you mean 'steps'?"),
        (("ranks = 2", "ranks = 5"), "5 ranks need at least 5 layers; the model has 4"),
        (("ranks = 2", 'ranks = 2\nschedule = "zb-h3"'), "unknown schedule 'zb-h3'; choose one of"),
        (
            ("microbatches = 4", 'microbatches = 5\nschedule = "interleaved-1f1b"'),
            "5 microbatches are not a multiple of 2 ranks",
        ),
        (
            ("[layers]", '[policy]\nbalancer = "best"\n[layers]'),
            "unknown balancer 'best'; choose one of",
        ),
        (("f = [1, 1, 1, 1]", "f = [1, 1, 1, nan]"), "layer 3: layers.moments 0: f = NaN"),
        (("f = [1, 1, 1, 1]", "f = [1, 1, 1, 1"), "not TOML"),
        (("ranks = 2", "ranks = 2\nmemory_limit = 1500"), "over the limit of 1500"),
    ],
)
def test_bad_input_is_one_line(
    run: Run, small: Path, change: tuple[str, str], message: str
) -> None:
    small.write_text(SMALL.replace(*change, 1))
    status, out, err = run(small)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_a_plot_that_cannot_be_is_told_first(run: Run, small: Path, tmp_path: Path) -> None:
    assert "must end in .svg, .png or .pdf" in run(small, "--plot", "x.txt")[2]
    assert "there is no folder" in run(small, "--plot", tmp_path / "none/x.svg")[2]
    assert "cannot be read: No such file" in run(tmp_path / "none.toml")[2]


def test_the_fewest_ranks(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    status, out, _ = run(path, "--fewest-ranks", "0.1", "--json")
    assert status == 0
    needed = json.loads(out)["ranks_needed"]
    assert [moment["ranks"] for moment in needed["moments"]] == [2, 2]
    assert needed["mean"] == 2.0
    _, out, _ = run(path, "--fewest-ranks", "1")
    assert "needs 1.0 of 2 ranks on average" in out
    assert "ranks_needed" not in json.loads(run(path, "--json")[1])
