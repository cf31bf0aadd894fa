"""Every picture of a run draws, and its texts can be read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

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


def test_long_lines_are_means_of_equal_parts() -> None:
    xs, ys = thin(range(5000), [float(x % 2) for x in range(5000)])
    assert len(xs) <= 600
    assert max(abs(y - 0.5) for y in ys[:-1]) < 0.06
    assert thin([1.0, 2.0], [3.0, 4.0]) == ([1.0, 2.0], [3.0, 4.0])
