"""Every picture of a run draws, and its texts can be read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dynmo.events import EvalEvent, Event
from dynmo.report.figures import compared, pictures, thin
from tests.pictures import defects
from tests.report.folders import LAYER, end_of, make_run, steps_of


def changing(ranks: int = 2) -> list[Event]:
    """A run whose layers move twice, and whose first layers are frozen."""
    even, busy = (3,) * ranks, (0.4,) * ranks
    odd = (4, *even[2:], 2) if ranks > 1 else even
    parts = [
        steps_of(20, even, busy),
        steps_of(20, odd, busy, frozen=3, begin=20),
        steps_of(40, even, busy, begin=40),
    ]
    events = [event for part in parts for event in part]
    return [*events, EvalEvent(40, 2.5), EvalEvent(79, 2.2), end_of(events)]


@pytest.mark.parametrize("ranks", [1, 2, 24])
def test_pictures_have_no_texts_that_overlap(tmp_path: Path, ranks: int) -> None:
    limit = '[pipeline]\nmemory_limit = "2GiB"\n'
    layers = [LAYER] * 6 if ranks == 2 else []
    run = make_run(tmp_path / "run", changing(ranks), layers, (3, 3), limit)
    drawn = pictures(run)
    assert [picture.key for picture in drawn] == [
        *["timeline"] * bool(layers),
        "layers", "idleness", "loss", "gradient-norm", "speed", "memory",
    ]  # fmt: skip
    for picture in [*drawn, *(compared([run, run]) if ranks == 1 else ())]:
        assert not defects(picture.figure, column=8.4), picture.key


def test_values_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    events = steps_of(3)
    events[1] = replace(events[1], loss=float("nan"), gradient_norm=None)  # pyright: ignore[reportCallIssue]
    loss = next(x for x in pictures(make_run(tmp_path / "run", events)) if x.key == "loss")
    assert list(loss.x) == [0, 2]


def test_compared_lines_have_the_values_of_their_steps(tmp_path: Path) -> None:
    long = make_run(tmp_path / "a" / "run", steps_of(1500))
    short = make_run(tmp_path / "b" / "run", steps_of(6, begin=30))
    loss = compared([long, short])[1]
    mean = sum(step.loss for step in short.steps[:3]) / 3
    assert list(loss.lines) == ["run", "run (2)"]
    assert loss.lines["run (2)"][loss.x.index(30)] == pytest.approx(mean)
    assert loss.lines["run (2)"][loss.x.index(36)] is None
    names = [
        f"{'_' if place else ''}a-name-that-is-too-long-for-a-legend-{place}" for place in (0, 1)
    ]
    runs = [make_run(tmp_path / name, steps_of(2)) for name in names]
    cut = compared(runs)[0].figure.legends[0].get_texts()
    assert [text.get_text() for text in cut] == [
        "a-name-that…r-a-legend-0",
        " _a-name-tha…r-a-legend-1",
    ]
    legend = loss.figure.legends[0].get_texts()
    assert [text.get_text() for text in legend] == ["run", "run (2)"]


def test_limits_of_a_pipeline_hold_for_each_replica(tmp_path: Path) -> None:
    config = '[pipeline]\nmemory_limit = ["1GiB", "2GiB"]\n[parallel]\nreplicas = 2\n'
    run = make_run(tmp_path / "run", steps_of(2, busy=(0.4,) * 4), config=config)
    memory = next(each for each in pictures(run) if each.key == "memory")
    limits = np.asarray(memory.figure.axes[0].get_lines()[0].get_xdata())
    assert limits.tolist() == [1024, 1024, 2048, 2048]


def test_stages_of_a_v_are_on_the_ranks_that_stayed(tmp_path: Path) -> None:
    config = '[pipeline]\nschedule = "zb-v"\n[parallel]\npipeline = 4\n'
    run = make_run(tmp_path / "run", steps_of(4, (1, 1, 1, 1)), config=config)
    layers = next(each for each in pictures(run) if each.key == "layers")
    labels = [text.get_text() for text in layers.figure.axes[0].texts]
    assert labels == ["rank 0", "rank 1", "rank 1", "rank 0"]


def test_ranks_of_a_broken_config_are_those_of_the_steps(tmp_path: Path) -> None:
    config = '[pipeline]\nschedule = "zb-v"\n[parallel]\npipeline = 0\nreplicas = "x"\n'
    events = [replace(step, busy=()) for step in steps_of(2)]  # pyright: ignore[reportCallIssue]
    run = make_run(tmp_path / "run", events, config=config)
    assert "layers" in [each.key for each in pictures(run)]


def test_long_lines_are_means_of_equal_parts() -> None:
    xs, ys = thin(range(5000), [float(x % 2) for x in range(5000)])
    assert len(xs) <= 600
    assert max(abs(y - 0.5) for y in ys[:-1]) < 0.06
    assert thin([1.0, 2.0], [3.0, 4.0]) == ([1.0, 2.0], [3.0, 4.0])
