"""Figures in the documents: how they are read from a result file and compared."""

from __future__ import annotations

import pytest

from docs.tools import figures

pytestmark = pytest.mark.docs

FILE = {
    "share": 0.0198,
    "bytes": 82_400_000_000,
    "runs": [{"seconds": 0.0131}, {"seconds": 0.72}, {"seconds": 0.05}],
    "sides": {"even": 2.5, "balanced": 1.75},
    "fastest": "torch zbv",
}


@pytest.fixture(autouse=True)
def _one_result_file(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    monkeypatch.setattr(figures, "result_of", lambda file: {"a.json": FILE}[file])


@pytest.mark.parametrize(
    ("mark", "shown"),
    [
        ("share .1%", "2.0 %"),
        ("runs.1.seconds .1f", "0.7"),
        ("bytes GB", "82"),
        ("runs.0.seconds ms", "13"),
        ("max runs.*.seconds .2f", "0.72"),
        ("min runs.1:3.seconds .2f", "0.05"),
        ("max sides.* .1f", "2.5"),
        ("fastest s", "torch zbv"),
    ],
)
def test_a_figure_is_written_and_compared(mark: str, shown: str) -> None:
    text = f"about <!-- figure a.json {mark} -->9<!-- end --> of it"
    assert figures.fill(text) == f"about <!-- figure a.json {mark} -->{shown}<!-- end --> of it"
    assert len(figures.differences(text)) == 1
    assert not figures.differences(figures.fill(text))


def test_unreadable_mark_is_reported() -> None:
    assert figures.differences("<!-- figure a.json share -->2<!-- end -->")
    with pytest.raises(AssertionError, match="3 values"):
        figures.fill("<!-- figure a.json runs.*.seconds .2f -->2<!-- end -->")
