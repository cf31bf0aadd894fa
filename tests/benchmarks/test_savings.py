"""The savings benchmarks on small sizes: the parts of a loss add up."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import savings_attention, savings_experts
from benchmarks.harness import bound_of
from benchmarks.savings_freezing import cache
from benchmarks.savings_pruning import half, layers, pruned_half, sparse_seconds
from benchmarks.savings_tokens import size_row


def test_bound_is_named_if_the_share_is_small() -> None:
    lost = {"kernel": 0.2, "packing": 0.3, "elsewhere": -0.1}
    assert bound_of(0.84, lost) == {"lost": lost, "bounded_by": "packing"}
    assert bound_of(0.85, lost) == {"lost": lost, "bounded_by": None}


def adds_up(row: dict[str, Any], seconds: dict[str, float]) -> None:
    """The losses are what a row takes over the ideal. The largest of them bounds a small share."""
    lost, over = row["lost"], sum(seconds.values()) - sum(row["ideal"].values())
    assert sum(lost.values()) == pytest.approx(over)
    if "bounded_by" in row:
        is_close = row["share_of_ideal"] >= 0.85
        assert row["bounded_by"] == (None if is_close else max(lost, key=lost.__getitem__))


def test_losses_of_pruning_add_up() -> None:
    for row in layers(32, 2, 64, (0.5, 0.9), 1):
        assert "bounded_by" in row
        adds_up(row, row["pruned"])
        assert set(row["lost"]) == {"kernel", "packing", "elsewhere"}
        assert row["lost"]["packing"] > 0
        # At most all of the linears' time goes.
        ideal = {key: row["dense"][key] - row["ideal"][key] for key in "fbw"}
        assert all(0 < ideal[key] <= row["sparsity"] * row["dense"][key] for key in "fbw")


@pytest.mark.parametrize("case", ["early_exit", "mixture_of_depths"])
def test_losses_of_token_cases_add_up(case: str) -> None:
    result = size_row(case, 32, 16, 1)
    for row in result["rows"].values():
        assert "bounded_by" in row
        adds_up(row, {key: row[key] for key in "fbw"})


def test_losses_of_experts_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(savings_experts, "TOKENS", 64)
    monkeypatch.setattr(savings_experts, "HIDDEN", 32)
    row = savings_experts.shape_row(4, 2, "one", 1)
    adds_up(row, {key: row[key] for key in "fbw"})


def test_a_dense_half_has_no_sparse_kernel() -> None:
    assert sparse_seconds(half(1, 32, 2, 64), 64, 1) == {"kernel": 0.0, "packing": 0.0}
    assert min(sparse_seconds(pruned_half(1, 32, 2, 64, 0.9), 64, 1).values()) > 0


def test_losses_of_sparse_attention_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("BATCH", 1), ("HEADS", 1), ("HIDDEN", 32)):
        monkeypatch.setattr(savings_attention, name, size)
    row = savings_attention.length(64, 1)
    for name, kind in row["kinds"].items():
        over = sum(kind[key] - kind["ideal"][key] for key in "fb")
        assert sum(kind["lost"].values()) == pytest.approx(over)
        assert set(kind["lost"]) == (
            {"elsewhere"} if name.startswith("drop") else {"around", "padding", "rate", "elsewhere"}
        )
        assert 0 < kind["pairs"] <= kind["computed"] <= 1
        if not name.startswith("drop"):
            assert kind["lost"]["around"] > 0, "hashing and gathering take their time"
            assert (kind["lost"]["padding"] > 0) == (kind["computed"] > kind["pairs"])


def test_cache_row_of_a_frozen_block() -> None:
    row = cache(32, 2, 64, 2)
    assert (row["layers"], row["bytes_per_sequence"]) == (2, 64 * 32 * 4)
    assert row["speedup"] == pytest.approx(row["seconds"]["run"] / row["seconds"]["taken"])
