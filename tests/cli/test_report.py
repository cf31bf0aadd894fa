"""`dynmo report` for one run, for several runs, and for folders that are not runs."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import partial
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from dynmo.change_events import RebalanceEvent, RebalanceResultEvent
from dynmo.cost.layer_cost import LayerCost
from dynmo.event_log import EventLog
from dynmo.events import EndEvent, EvalEvent, Event, StepResult
from dynmo.plan.partition import Partition
from dynmo.plan.problem import Mesh
from dynmo.report.comparison import comparison_table
from dynmo.report.summary import summarize
from tests.cli.plans import answer
from tests.cli.runs import Run, assert_refused
from tests.plan.questions import question


@pytest.fixture
def run(dynmo: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """`dynmo report` in a folder of its own, as if piped."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    return partial(dynmo, "report")


def step(number: int, seconds: float, layers: tuple[int, int] = (4, 4), frozen: int = 0) -> Event:
    rates, loss = (1234.5, 0.25, 0.5, seconds, 1.5, 1e-3), 0.5 - number / 100
    return StepResult(number, loss, *rates, layers, frozen, inherent_idle=0.0625)


def log(folder: str, events: Sequence[Event]) -> Path:
    path = Path(folder) / "events.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    log = EventLog(path)
    for event in events:
        log.write(event)
    log.close()
    return path


def a_run(seconds: float, digest: str = "0123456789abcdef" * 4) -> list[Event]:
    """Ten steps, and half a second between them. A move after five halves the step."""
    before = [step(i, seconds) for i in range(5)]
    move = RebalanceEvent(5, 1, (4, 4), (6, 2), 3 << 20, 0.012, 0.2, "exact: pays")
    after = [step(i, seconds / 2, (6, 2), 3) for i in range(5, 10)]
    held_out = EvalEvent(9, 0.31415926)
    end = EndEvent(10, 0.41, digest, 7.5 * seconds + 0.5, "done", 0.05, 0.1, 0.2)
    return [*before, move, *after, RebalanceResultEvent(9, 1, 0.5), held_out, end]


def test_report_of_one_run(run: Run) -> None:
    log("runs/one", a_run(0.5))
    out = run("runs/one").good
    assert out.startswith("loss 0.410000, held-out loss 0.314159, 10 steps in 3.8 s, 1,234 tok")
    rows = [
        re.split(r"\s*│\s*", line.strip("│ ")) for line in out.splitlines() if line.startswith("│")
    ]
    same = ["1,234", "25.0%", "6.2%", "18.8%", "0.50"]
    assert rows == [["0-4", "4+4", "0", "0.500", *same], ["5-9", "6+2", "3", "0.250", *same]]
    moved = "step 5: moved 4+4 to 6+2 (3.0 MiB in 12 ms): "
    assert f"{moved}static to balanced x1.25 predicted, x2.00 measured\n" in out


def test_a_line_says_why_no_layer_moved(run: Run) -> None:
    path = log("a", [step(i, 0.5) for i in range(10)]).parent / "decisions.jsonl"
    why = "no layer moved: "
    assert why not in run("a").good, "no decision was made"
    layers = (LayerCost(0.01, 0.01, 0.01),) * 8
    path.write_text(question(layers, Mesh(2, 1, 4, 1, "1f1b"), Partition((4, 4))).to_text() + "\n")
    [line] = [line for line in run("a").good.splitlines() if line.startswith(why)]
    assert line.startswith(f"{why}step 50: stay: ")
    assert line.endswith(f"(dynmo simulate {path})")
    log("a", a_run(0.5))
    assert why not in run("a").good
    path.write_text('{"kind":"move","situation":{}}\n')  # of an earlier version
    log("b", [step(0, 0.5)]).with_name("decisions.jsonl").write_text(path.read_text())
    assert why not in run("b").good


def test_report_compares_several_runs(run: Run) -> None:
    """Figures are printed whole, although a pipe has no width."""
    names = [f"a-name-of-some-length-{i}" for i in range(5)]
    for i, name in enumerate(names):
        log(f"runs/{name}", a_run(0.5 * (i + 1)))
    out = run(*(f"runs/{name}/" for name in names)).good
    assert "…" not in out
    assert out.startswith("Runs compared")
    assert out.count("┏") == 1
    for name in names:
        assert name in out
    assert re.search(r"speed-up +│ +x1.00 │ +x0.53 │ +x0.36 │", out)
    assert out.endswith("same loss and same weights, to the last bit\n")


def test_narrow_terminal_shows_every_figure() -> None:
    """Three runs fit in 80 columns. In 50 columns the lines are folded, not cut."""
    runs = [(f"demo-{i}", summarize(a_run(0.5))) for i in range(3)]
    for width in (80, 50):
        screen = StringIO()
        Console(file=screen, width=width, force_terminal=True, color_system=None).print(
            comparison_table(runs)
        )
        assert "…" not in screen.getvalue()
        assert ("0123456789ab" in screen.getvalue()) == (width == 80)


def test_plot_of_two_runs_is_an_svg_file(run: Run) -> None:
    for name in ("a", "b"):
        log(name, a_run(0.5))
    assert run("a", "b", "--plot", "bubbles.svg").status == 0
    assert "<svg" in Path("bubbles.svg").read_text()
    assert_refused(run("a", "--plot", "bubbles.txt"), "--plot bubbles.txt")


def test_verdict_on_different_or_unfinished_runs(run: Run) -> None:
    log("a", a_run(0.5))
    log("b", a_run(0.5, digest="f" * 64))
    log("c", a_run(0.5)[:-1])
    assert "different weights" in run("a", "b").out.splitlines()[-1]
    assert "has not ended" in run("a", "c").out.splitlines()[-1]


def test_json_output(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    log("a", a_run(0.5))
    log("b", a_run(1 / 3))
    result = answer(run, "a", "b")
    assert result["verdict"] == "same loss and same weights, to the last bit"
    a, b = result["runs"]
    whole = {"name": "a", "steps": 10, "loss": 0.5 - 9 / 100, "held_out": 0.31415926}
    seconds = {"seconds": 3.75, "run_seconds": 4.25, "measure_seconds": 0.05}
    parts = {"decide_seconds": 0.1, "move_seconds": 0.2, "reason": "done"}
    assert a.items() >= (whole | seconds | parts).items()
    assert "done" not in a
    assert b["phases"][0]["seconds"] == 1 / 3, "read back exactly"
    phase = {"first": 5, "last": 9, "layers": [6, 2], "frozen": 3, "seconds": 0.25}
    shares = {"idle_ratio": 0.25, "imbalance": 0.5, "inherent_idle": 0.0625}
    assert a["phases"][1] == phase | shares | {"tokens_per_s": 1234.5}
    # Events have the words that they have in events.jsonl.
    written = [json.loads(line) for line in Path("a/events.jsonl").read_text().splitlines()]
    assert a["rebalances"] == [e for e in written if e["event"] == "rebalance"]
    assert a["results"] == [e for e in written if e["event"] == "rebalance_result"]
    monkeypatch.chdir("a")
    alone = json.loads(run(".", "--json")[1])
    assert (alone["runs"][0]["name"], alone["verdict"]) == ("a", None)


@pytest.mark.parametrize(
    ("content", "mentions"),
    [
        (None, ["a is no run: it has no events.jsonl; give runs/NAME"]),
        (b'{"event": "step"', ["a/events.jsonl", "no steps"]),
        (b"[1]\n", ["a/events.jsonl:1:"]),
        (b"\xff\xfe\n", ["a/events.jsonl", "UTF-8"]),
    ],
    ids=["none", "torn", "no object", "binary"],
)
def test_folder_that_is_not_a_run_is_refused(
    run: Run, content: bytes | None, mentions: list[str]
) -> None:
    Path("a").mkdir()
    if content is not None:
        Path("a/events.jsonl").write_bytes(content)
    log("good", a_run(0.5))
    for arguments in (["a"], ["good", "a", "--json"]):
        assert_refused(run(*arguments), *mentions)


def test_report_names_the_config_differences(run: Run) -> None:
    for name, steps in (("a", 4), ("b", 6)):
        log(name, a_run(0.5))
        (Path(name) / "config.toml").write_text(f'name = "{name}"\n[train]\nsteps = {steps}\n')
    assert "the configs differ in train.steps (4, 6)\n" in run("a", "b")[1]
    assert json.loads(run("a", "b", "--json")[1])["differences"] == {"train.steps": [4, 6]}


def test_path_that_is_not_a_folder_is_refused(run: Run) -> None:
    path = log("a", a_run(0.5))
    assert_refused(run(path), path, "folder, a")
    assert_refused(run("runs/nothing"), "runs/nothing is no folder; give a run, such as runs/NAME")
