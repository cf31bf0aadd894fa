"""The benchmark of scaling: what it makes of the traces, and that the document shows what it printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.scaling import WEAK, equal_memory, tables, vertical, weak

ROOT = Path(__file__).parents[2]


def test_weak_scaling_at_one_moment() -> None:
    rows = weak(24)
    assert [(x["blocks"], x["pipeline"]) for x in rows] == list(WEAK)
    for x in rows:
        assert 1 <= x["speed_up"] <= x["bound"] + 1e-9, "halves placed by simulated time: at least as good as even, at most perfect"
    assert rows[0]["efficiency"] == {"static": 1.0, "balanced": 1.0, "perfect": 1.0}


def test_short_pipelines_have_little_to_gain() -> None:
    assert all(0.99 < x["speed_up"] <= x["bound"] + 1e-9 < 1.1 < x["published"] for x in vertical(24))


def test_twice_the_size_stays_within_the_memory() -> None:
    for x in equal_memory():
        assert max(x["peak_memory"][:2]) <= 2 * x["ranks"] + 1e-9
        assert x["peak_memory"][2] <= 2 * x["ranks"], "1F1B keeps p microbatches, each of twice the size"
        assert x["over_1f1b"] > x["over_zb_1p"] > 0


def test_the_document_shows_the_results() -> None:
    result: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / "scaling.json").read_text())
    document = (ROOT / "docs" / "scaling.md").read_text()
    for name, table in tables(result).items():
        assert f"{table}\n" in document, name
