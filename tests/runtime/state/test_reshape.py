"""Layer transfers when the same ranks change to another mesh."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynmo.balance.partition import Move, Partition, uniform
from dynmo.runtime.state.reshape import holders, transfers

SHAPES = [(pipeline, 12 // pipeline) for pipeline in (1, 2, 3, 4, 6, 12)]


def test_transfers_match_the_example_in_the_docstring() -> None:
    """The example is in the docstring of the module."""
    before, after = holders(Partition((4, 4)), (0, 1), 2), holders(Partition((8,)), (0,), 4)
    assert before == ((0, 1),) * 4 + ((2, 3),) * 4
    assert after == ((0, 1, 2, 3),) * 8
    assert transfers(before, after) == tuple(
        [Move(layer, *way) for layer in range(4) for way in ((0, 2), (1, 3))]
        + [Move(layer, *way) for layer in range(4, 8) for way in ((2, 0), (3, 1))]
    )
    assert transfers(before, before) == ()


@given(st.sampled_from(SHAPES), st.sampled_from(SHAPES), st.integers(12, 20))
def test_each_rank_receives_its_missing_layers_from_a_holder(
    old: tuple[int, int], new: tuple[int, int], layers: int
) -> None:
    before, after = (
        holders(uniform(layers, pipeline), range(pipeline), data) for pipeline, data in (old, new)
    )
    plan = transfers(before, after)
    assert [m.layer for m in plan] == sorted(m.layer for m in plan)
    for layer in range(layers):
        moves = [m for m in plan if m.layer == layer]
        assert {m.target for m in moves} == set(after[layer]) - set(before[layer])
        assert len({m.target for m in moves}) == len(moves), "once each"
        assert {m.source for m in moves} <= set(before[layer])
        given_by = [sum(m.source == rank for m in moves) for rank in before[layer]]
        assert max(given_by) - min(given_by) <= 1, "they take turns"
