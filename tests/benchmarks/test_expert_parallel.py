"""The sides of `benchmarks.expert_parallel` train the same weights.

Each side moves experts or layers as its name says.
"""

from __future__ import annotations

import pytest

from benchmarks.expert_parallel import summarize
from benchmarks.expert_parallel_race import SIDES
from tests.pool import Pool


@pytest.mark.matrix
def test_four_sides_train_the_same_weights(pool: Pool) -> None:
    sides = pool.run("benchmarks.expert_parallel_race:race", 4, steps=6, scale=0.02)[0]
    assert list(sides) == list(SIDES)
    result = summarize(sides)
    assert result["same_weights"]
    rows = result["rows"]
    assert not rows["static"]["changes"]
    assert not rows["static"]["moves"]
    assert rows["experts placed"]["busiest"] < rows["static"]["busiest"] - 0.2
    assert rows["both"]["changes"] == rows["experts placed"]["changes"]
