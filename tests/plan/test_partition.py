"""Placements of contiguous layers."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynmo.cost.layer_cost import LayerCost
from dynmo.errors import PartitionError
from dynmo.plan.partition import (
    Move,
    Partition,
    imbalance,
    kept_ranks,
    moves_between_ranks,
    stage_loads,
    uniform,
    weigh,
)

many = settings(derandomize=True)


@st.composite
def placements(draw: st.DrawFn, layers: int) -> Partition:
    ranks = draw(st.integers(1, layers))
    cuts = draw(st.sampled_from([*combinations(range(1, layers), ranks - 1)]))
    return Partition.from_bounds((0, *cuts, layers))


@many
@given(st.data(), st.integers(1, 9))
def test_moves_transform_the_old_placement_into_the_new(data: st.DataObject, layers: int):
    old, new = data.draw(placements(layers)), data.draw(placements(layers))
    owners = [old.owner(layer) for layer in range(layers)]
    for layer, source, target in moves_between_ranks(old, new):
        assert owners[layer] == source != target
        owners[layer] = target
    assert owners == [new.owner(layer) for layer in range(layers)]
    assert moves_between_ranks(old, old) == ()


def test_moves_are_in_layer_order():
    found = moves_between_ranks(Partition((3, 1)), Partition((1, 2, 1)))
    assert found == (Move(1, 0, 1), Move(2, 0, 1), Move(3, 1, 2))


def test_partition_of_a_small_example():
    partition = Partition((3, 2, 3))
    assert (partition.layers, partition.stages, partition.bounds) == (8, 3, (0, 3, 5, 8))
    assert [list(partition.range_of(stage)) for stage in range(3)] == [[0, 1, 2], [3, 4], [5, 6, 7]]
    assert [partition.owner(layer) for layer in range(8)] == [0, 0, 0, 1, 1, 2, 2, 2]
    assert Partition.from_bounds(partition.bounds) == partition
    assert hash(Partition((3, 2, 3))) == hash(partition)


def test_uniform_gives_the_first_stages_one_layer_more():
    assert uniform(8, 4).counts == (2, 2, 2, 2)
    assert uniform(10, 4).counts == (3, 3, 2, 2)
    assert uniform(3, 3).counts == (1, 1, 1)


def test_frozen_layer_weighs_less_by_time_only():
    layers = (LayerCost(1.0, 2.0, 3.0, parameters=5), LayerCost(1.0, 0.0, 0.0, parameters=5))
    assert weigh(layers, "time") == (6.0, 1.0)
    assert weigh(layers, "parameters") == (5, 5)


def test_loads_and_imbalance():
    assert stage_loads([4.0, 3.0, 2.0, 2.0, 1.0], Partition((2, 3))) == (7.0, 5.0)
    assert stage_loads([0.1] * 10, Partition((10,))) == (1.0,)
    assert imbalance([7.0, 5.0]) == pytest.approx(2 / 6)
    assert imbalance([3.0, 3.0]) == 0.0
    assert imbalance([0.0, 0.0]) == 0.0


def test_more_ranks_than_layers_are_refused():
    with pytest.raises(PartitionError, match=r"5 ranks .* 4"):
        uniform(4, 5)
    with pytest.raises(PartitionError, match="0 ranks"):
        uniform(4, 0)


def test_bad_partitions_are_refused():
    for counts in ((), (2, 0, 1), (3, -1)):
        with pytest.raises(PartitionError):
            Partition(counts)
    two = Partition((1, 1))
    with pytest.raises(PartitionError, match="stage 2"):
        two.range_of(2)
    with pytest.raises(PartitionError, match="layer -1"):
        two.owner(-1)
    with pytest.raises(AssertionError, match="same model"):
        moves_between_ranks(two, Partition((3,)))


# -- the ranks that stay ---------------------------------------------------------------------------


@given(st.lists(st.sampled_from(["", *"abc"]), min_size=1, max_size=9), st.data())
def test_kept_ranks_empty_the_most_nodes(nodes: list[str], data: st.DataObject) -> None:
    """The result is compared with all choices that keep the machine without a name."""
    count = data.draw(st.integers(1, len(nodes)))
    kept = kept_ranks(nodes, count)
    assert list(kept) == sorted(set(kept))
    assert len(kept) == count
    choices = ({nodes[rank] for rank in each} for each in combinations(range(len(nodes)), count))
    fewest = min(len(each) for each in choices if "" in each or "" not in nodes)
    assert len({nodes[rank] for rank in kept}) == fewest


def test_small_nodes_are_emptied_first() -> None:
    assert kept_ranks(("n",) * 5, 3) == (0, 1, 2)
    assert kept_ranks("aabbcc", 4) == (0, 1, 2, 3), "of equally small nodes the last is emptied"
    assert kept_ranks("abbccc", 5) == (1, 2, 3, 4, 5), "rank 0 leaves like any other"
    assert kept_ranks(["", "b", "b"], 2) == (0, 1), "a machine without a name stays to the last"
    for count in (0, 3):
        with pytest.raises(AssertionError):
            kept_ranks("ab", count)


def test_slow_ranks_leave_first() -> None:
    assert kept_ranks("aabb", 3, (1, 0.5, 1, 1)) == (0, 2, 3)
    assert kept_ranks("aabb", 2, (1, 0.5, 1, 0.25)) == (0, 2)
    assert kept_ranks("aabb", 1, (1, 0.5, 1, 1)) == (0,), "of the rest the last node is emptied"
    one = ("", "", "")
    assert kept_ranks(one, 2, (1, 0.5, 1)) == (0, 2)
    assert kept_ranks(one, 2, (0.5, 1, 1)) == (0, 1), "the store may end with its rank"
