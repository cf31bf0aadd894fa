"""The evaluation of the scaling benchmark."""

from __future__ import annotations

from benchmarks.published import table_5
from benchmarks.scaling import WEAK, equal_memory, vertical, weak


def test_weak_scaling_gain_is_within_its_bound() -> None:
    rows = weak(24)
    assert [(x["blocks"], x["pipeline"]) for x in rows] == list(WEAK)
    for x in rows:
        assert 1 <= x["speed_up"] <= x["bound"] + 1e-9, (
            "halves placed by simulated time: at least as good as even, at most perfect"
        )
    assert rows[0]["efficiency"] == {"static": 1.0, "balanced": 1.0, "perfect": 1.0}


def test_short_pipelines_have_little_to_gain() -> None:
    assert all(
        0.99 < x["speed_up"] <= x["bound"] + 1e-9 < 1.1 < x["published"] for x in vertical(24)
    )


def test_double_size_microbatches_stay_within_memory() -> None:
    settings = [row for row in table_5() if row["microbatches"] == 3 * row["ranks"]]
    for x in equal_memory(settings):
        assert max(x["peak_memory"][:2]) <= 2 * x["ranks"] + 1e-9
        assert x["peak_memory"][2] <= 2 * x["ranks"], (
            "1F1B keeps p microbatches, each of twice the size"
        )
        assert x["over_1f1b"] > x["over_zb_1p"] > 0
