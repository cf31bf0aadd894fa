"""The best mesh of each number of ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynmo.cost.layer_cost import LayerCost, LinkCost
from dynmo.cost.profile_file import Profile
from dynmo.errors import NoRoomError, PartitionError
from dynmo.plan.problem import Allowed, Problem
from dynmo.plan.ranks import rank_table


def test_table_has_a_row_for_every_number_of_ranks() -> None:
    layers = (LayerCost(1.0, 1.0, 1.0, 1, 10, 10, 20),) * 8
    links = (((0, 1), LinkCost(0.0, 100.0)),)
    profile = Profile(layers, tuple("abcdefgh"), links=links, microbatch=1)
    problem = Problem(profile, memory_limit=200, bandwidth=100.0)
    allowed = Allowed(6, 8, (1,), ("zb-h1",))
    table = rank_table(problem, allowed, 0.5, retune=True)
    assert [row.ranks for row in table.rows] == [1, 2, 3, 4, 5, 6]
    assert [row.ranks for row in table.rows if row.plan is None] == [1]
    reason = table.rows[0].problem
    assert reason is not None
    assert "over the limit of 200" in reason
    plans = [row.plan for row in table.rows if row.plan is not None]
    assert plans[-1].seconds == table.full_seconds
    assert table.limit_seconds == 1.5 * table.full_seconds
    assert min(x.mesh.gpus for x in plans if x.seconds <= table.limit_seconds) == table.fewest
    assert all(plan.mesh.micro_batch == 1 for plan in plans)
    for row in table.rows[1:]:
        assert row.plan is not None
        assert row.retuned is not None
        assert row.retuned.seconds <= row.plan.seconds
        assert row.retuned.mesh.global_batch == 8
    assert all(row.retuned is None for row in rank_table(problem, allowed, 0.5).rows)
    with pytest.raises(NoRoomError):
        rank_table(replace(problem, memory_limit=50), allowed, 0.5)
    with pytest.raises(PartitionError, match="12 ranks have no mesh"):
        rank_table(problem, replace(allowed, gpus=12, replicas=(1,)), 0.5)
