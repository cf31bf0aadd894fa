"""The number of ranks that a workload needs over time."""

from __future__ import annotations

from typing import Any

import pytest

from dynmo.cost.layer_cost import LayerCost
from dynmo.errors import InputError
from dynmo.plan.workload import LayerSection, Moment, Workload, mean_ranks, ranks_needed

WHOLE = LayerCost(1.0, 1.0, 1.0, weight_bytes=100)
SMALL = LayerCost(0.3, 0.3, 0.3, weight_bytes=100)
MOMENTS = [Moment.of(step, (cost,) * 8) for step, cost in ((0, WHOLE), (10, SMALL), (30, WHOLE))]


def growing(**given: Any) -> Workload:
    return Workload(
        steps=40, ranks=4, microbatches=8, layers=LayerSection(moments=MOMENTS), **given
    )


def test_small_model_needs_fewer_ranks_than_a_large_model() -> None:
    rows = ranks_needed(growing(), 0.0)
    assert [(row.first, row.last) for row in rows] == [(0, 9), (10, 29), (30, 39)]
    assert [row.ranks for row in rows] == [4, 2, 4]
    assert all(sum(row.layers) == 8 for row in rows)
    assert rows[1].seconds <= rows[0].seconds
    assert mean_ranks(rows) == 3.0


def test_tolerance_allows_fewer_ranks() -> None:
    assert [row.ranks for row in ranks_needed(growing(), 4.0)] == [1, 1, 1]


def test_memory_limit_requires_more_ranks() -> None:
    """Four layers fit on a rank."""
    rows = ranks_needed(growing(memory_limit=450), 2.5)
    assert [row.ranks for row in rows] == [2, 2, 2]
    with pytest.raises(InputError):
        ranks_needed(growing(memory_limit=150), 0.0)


def test_ranks_needed_with_several_stages_per_rank() -> None:
    rows = ranks_needed(growing(schedule="zb-v"), 0.0)
    assert rows[0].ranks == 4
    assert rows[1].ranks <= 2
    assert len(rows[1].layers) == 2 * rows[1].ranks
