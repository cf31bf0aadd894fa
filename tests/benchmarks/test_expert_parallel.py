"""The sides of `benchmarks.expert_parallel` train the same weights, and act as they say."""

from __future__ import annotations

import pytest

from benchmarks.expert_parallel import summarize
from benchmarks.expert_parallel_race import SIDES
from tests.pool import Pool


@pytest.mark.matrix
def test_the_four_sides(pool: Pool) -> None:
    sides = pool.run("benchmarks.expert_parallel_race:race", 4, steps=6, scale=0.02)[0]
    assert list(sides) == list(SIDES)
    result = summarize(sides)
    assert result["same_weights"]
    rows = result["rows"]
    assert not rows["static"]["changes"]
    assert not rows["static"]["moves"]
    assert rows["experts placed"]["busiest"] < rows["static"]["busiest"] - 0.2
    assert rows["both"]["changes"] == rows["experts placed"]["changes"]
