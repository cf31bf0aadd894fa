"""The page of a run: whole in one file, escaped, and small for long runs."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from dynmo.change_events import RebalanceEvent, RebalanceResultEvent, RecoverEvent, ReshapeEvent
from dynmo.events import CheckpointEvent, Event, FaultEvent
from dynmo.report.page import page
from tests.report.folders import LAYER, drawn, end_of, make_run, steps_of

HOSTILE = '<img src=x onerror="alert(1)">$\\frac{'


@pytest.fixture
def with_one_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynmo.report.page.pictures", drawn)


def test_page_asks_for_nothing_from_elsewhere(tmp_path: Path) -> None:
    text = page([make_run(tmp_path / "run", steps_of(5), [LAYER] * 4)])
    assert "default-src 'none'" in text
    addresses = set(re.findall(r"""(?:src|href)=["']?([^"' >]+)""", text))
    assert all(address.startswith("#") for address in addresses), addresses
    assert set(re.findall(r"https?://[^\"' <]+", text)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }


@pytest.mark.usefixtures("with_one_picture")
def test_names_are_escaped(tmp_path: Path) -> None:
    events = [*steps_of(3), FaultEvent(2, HOSTILE)]
    one, other = (make_run(tmp_path / x / HOSTILE.replace("/", ":"), events) for x in "ab")
    for text in (page([one]), page([one, other])):
        assert "<img" not in text
        assert "&lt;img src=x" in text


@pytest.mark.usefixtures("with_one_picture")
def test_gain_that_did_not_come_is_explained(tmp_path: Path) -> None:
    move = RebalanceEvent(5, 1, (2, 2), (3, 1), 1 << 20, 0.01, 0.2, "exact: pays")
    steps = steps_of(9)
    for load, word in ((6.0, "the machine was busy"), (0.5, "the costs were wrong")):
        missed = [*steps[:5], move, *steps[5:], RebalanceResultEvent(8, 1, 0.01)]
        text = page([make_run(tmp_path / word / "run", [*missed, end_of(steps, load)])])
        assert "+20.0% of a step saved" in text
        assert "+1.0% of a step saved" in text
        assert word in text
    slower = replace(move, predicted_gain=-0.05)
    came = [*steps[:5], slower, *steps[5:], RebalanceResultEvent(8, 1, -0.04)]
    assert "less than predicted" not in page([make_run(tmp_path / "slower", came)])
    unknown = page([make_run(tmp_path / "run", [*steps[:5], move, *steps[5:]])])
    assert "not measured: the run ended" in unknown


@pytest.mark.usefixtures("with_one_picture")
def test_goodput_counts_steps_that_were_done_again(tmp_path: Path) -> None:
    saved = CheckpointEvent(9, "checkpoints/step-10", 1 << 20, 1.0, 0.5, time=105.0)
    events: list[Event] = [*steps_of(10), saved, *steps_of(6, begin=8)]
    run = make_run(tmp_path / "run", events)
    parts = run.goodput.parts
    assert parts["steps that count"] == 7.0
    assert parts["steps done again or skipped"] == 1.0
    assert parts["saving, while training waits"] == 0.5
    assert "step 8: went on after a stop; 2 steps were done again" in page([run])


def test_goodput_counts_a_change_once(tmp_path: Path) -> None:
    """The end of a process has the seconds of its changes. One that was cut off has no end."""
    reshape = ReshapeEvent(4, (2, 1), (1, 2), (4,), 0, 2.0, time=102.0)
    cut = [*steps_of(4), reshape, *steps_of(2, begin=4)]
    end = replace(end_of(cut), decide_seconds=0.5, move_seconds=2.0)
    key = "measuring, deciding, moving"
    assert make_run(tmp_path / "cut", cut).goodput.parts[key] == 2.0
    assert make_run(tmp_path / "whole", [*cut, end]).goodput.parts[key] == 2.5
    resumed = [*cut, *steps_of(2, begin=5), replace(end, time=200.0)]
    assert make_run(tmp_path / "resumed", resumed).goodput.parts[key] == 4.5


def test_goodput_counts_faults_and_the_ranks_that_are_left(tmp_path: Path) -> None:
    fault = RecoverEvent(8, ("a:1",), "killed", 0.75, 2, 2, 1, (2, 1), (1, 1), (4,), time=105.0)
    run = make_run(tmp_path / "run", [*steps_of(10), fault, *steps_of(6, begin=8)])
    assert run.goodput.parts["going on after faults"] == 0.75
    assert run.all(RecoverEvent) == [fault]
    assert run.summary.ranks is not None
    assert 1 < run.summary.ranks.mean < 2


def test_long_run_is_a_small_page(tmp_path: Path) -> None:
    text = page([make_run(tmp_path / "run", steps_of(5000), [LAYER] * 4)])
    assert len(text) < 1_000_000
