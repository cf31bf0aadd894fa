"""The four sides of `benchmarks.experts`, on a shallow model."""

from __future__ import annotations

from statistics import fmean

from benchmarks.expert_loads import EXPERTS, REPLICAS, TOKENS, TOP_K, draw_counts
from benchmarks.experts import busiest, row
from dynmo.models.group_placement import even_placement


def test_counts_follow_the_skew() -> None:
    """Every replica has the same number of tokens. Later layers are less even."""
    moments = draw_counts(6, 0.8, moments=2)
    assert moments == draw_counts(6, 0.8, moments=2)
    for counts in (counts for moment in moments for counts in moment):
        assert len(counts) == REPLICAS
        assert all(abs(sum(tokens) - TOKENS * TOP_K) <= EXPERTS for tokens in counts)
    even = even_placement(EXPERTS, REPLICAS)
    first, last = (fmean(busiest(even, moment[block]) for moment in moments) for block in (0, 5))
    assert first < last


def test_gains_of_the_four_sides_are_ordered() -> None:
    one = row(0.8, REPLICAS, 1, blocks=8, stride=12)
    gain, ratio = one["gain"], one["busiest"]
    assert ratio["bound"] <= ratio["known at once"] <= ratio["static"]
    assert 1.0 == gain["static"] < gain["experts placed"] <= gain["perfect"]
    assert gain["both"] >= gain["experts placed"] - 1e-9
    assert gain["known at once"] <= gain["perfect"]
