"""The checks of pictures find what is hard to read, and nothing else."""

from __future__ import annotations

import pytest

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure

from tests.pictures import alike_in_grey, covered_by_legend, overlaps, too_small


def test_texts_that_overlap_or_leave_are_named() -> None:
    figure = Figure(figsize=(4, 3), layout="constrained")
    axes = figure.subplots()
    axes.set(title="title", xticks=[0, 1], xlim=(0, 1))
    assert overlaps(figure) == []
    axes.text(0.5, 0.5, "one")
    axes.text(0.52, 0.5, "two")
    figure.text(0.98, 0.5, "far")
    assert set(overlaps(figure)) == {"'one' overlaps 'two'", "'far' leaves the figure"}


def test_turned_labels_are_measured_as_they_lie() -> None:
    figure = Figure(figsize=(4, 4), layout="constrained")
    axes = figure.subplots()
    names = [f"a long name {i}" for i in range(8)]
    axes.set_xticks(range(8), names)
    assert overlaps(figure)
    axes.set_xticks(range(8), names, rotation=45, ha="right", rotation_mode="anchor")
    assert overlaps(figure) == []


@pytest.mark.parametrize("kind", ["line", "bar", "area", "steps", "point"])
def test_legend_on_data_is_named(kind: str) -> None:
    figure = Figure(figsize=(4, 3), layout="constrained")
    axes = figure.subplots()
    axes.set(title=kind, xlim=(0, 1), ylim=(0, 1))
    match kind:
        case "line":
            axes.plot([0, 1], [0, 1], label="x")
        case "bar":
            axes.bar([0.9], [0.95], width=0.05, label="x")
        case "area":
            axes.fill_between([0, 1], [0, 1], label="x")
        case "steps":
            axes.step([0, 0.5, 1], [0, 0.9, 0.1], where="post", label="x")
        case _:
            axes.plot([0.9], [0.9], "o", label="x")
    axes.legend(loc="upper right")
    assert covered_by_legend(figure) == [f"a legend covers what is drawn in {kind!r}"]
    axes.legend(loc="upper left")
    assert covered_by_legend(figure) == []
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    assert covered_by_legend(figure) == []


def test_small_text_is_named_at_the_size_at_which_it_is_shown() -> None:
    figure = Figure(figsize=(8, 3), layout="constrained")
    figure.subplots().set_title("title", fontsize=9)
    assert too_small(figure, column=8) == []
    assert too_small(figure, column=4) == [
        *sorted({f"'{x}' has 5.0 points" for x in ("0.0", "0.2", "0.4", "0.6", "0.8", "1.0")}),
        "'title' has 4.5 points",
    ]


def test_entries_that_differ_in_hue_alone_are_named() -> None:
    figure = Figure(figsize=(4, 3), layout="constrained")
    axes = figure.subplots()
    axes.plot([0, 1], color="#d55e00", label="red")
    axes.plot([1, 2], color="#009e73", label="green")
    axes.plot([2, 3], "--", color="#009e73", label="dashed")
    axes.bar([0], [1], color="#d55e00", label="red bar")
    axes.bar([1], [1], color="#009e73", hatch="//", label="hatched bar")
    axes.legend()
    assert alike_in_grey(figure) == ["'red' looks like 'green' in grey"]
