from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynmo.cost.layer_cost import LayerCost
from dynmo.errors import PartitionError
from dynmo.plan.partition import Partition
from dynmo.plan.recompute import choose_recomputed, with_recompute
from dynmo.schedule.catalogue import make
from dynmo.schedule.memory import rank_memory
from dynmo.schedule.op import Schedule

NAMES = ("gpipe", "1f1b", "zb-h1", "zb-h2", "zb-v")


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[LayerCost, ...], tuple[int, ...], Schedule]:
    name = draw(st.sampled_from(NAMES))
    ranks, microbatches = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    stages = 2 * ranks if name == "zb-v" else ranks
    counts = tuple(
        draw(st.lists(st.integers(1, 3 if stages < 4 else 2), min_size=stages, max_size=stages))
    )
    size = st.integers(0, 20)
    layers: list[LayerCost] = []
    for _ in range(sum(counts)):
        activation, f, static = draw(size), draw(st.integers(1, 5)), (0, draw(size), draw(size), 0)
        kept = (activation, draw(st.integers(0, activation)), draw(size))
        layers.append(LayerCost(f, 1.0, 1.0, *static, *kept))
    return tuple(layers), counts, make(name, ranks, microbatches)


Case = tuple[tuple[LayerCost, ...], tuple[int, ...], Schedule]


def needs(case: Case, some: Collection[int]) -> tuple[int, ...]:
    layers, counts, schedule = case
    return rank_memory(with_recompute(layers, some), counts, schedule)


def chosen_of(case: Case, limits: Sequence[int]) -> frozenset[int]:
    layers, counts, schedule = case
    return choose_recomputed(
        layers, Partition(counts), schedule, lambda x: rank_memory(x, counts, schedule), limits
    )


@given(cases(), st.data())
def test_chosen_layers_fit_and_are_all_needed(case: Case, data: st.DataObject):
    schedule = case[2]
    least, most = needs(case, range(len(case[0]))), needs(case, ())
    pairs = zip(least, most, strict=True)
    limits = [data.draw(st.integers(low, max(low, high))) for low, high in pairs]
    chosen = chosen_of(case, limits)

    def fits(some: frozenset[int]) -> bool:
        return all(need <= limit for need, limit in zip(needs(case, some), limits, strict=True))

    assert fits(chosen)
    if fits(frozenset()):
        assert not chosen
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    limits[rank] = least[rank] - 1
    with pytest.raises(PartitionError, match=f"rank {rank} needs {least[rank]} bytes"):
        chosen_of(case, limits)


def test_recompute_time_is_close_to_the_minimum():
    """The choice is a knapsack problem, so greedy is not always optimal."""
    layers = tuple(
        LayerCost(f, 2.0, 1.0, 0, 1, 1, 2, a, 1, 2)
        for f, a in zip((3, 1, 4, 1, 5, 9, 2, 6, 5), range(8, 26, 2), strict=True)
    )
    case = layers, (9,), make("gpipe", 1, 3)
    (low,), (high,) = needs(case, range(9)), needs(case, ())
    every = [
        (sum(layers[i].f for i in chosen), needs(case, chosen)[0])
        for count in range(10)
        for chosen in combinations(range(9), count)
    ]
    ratios: list[float] = []
    for limit in range(low, high, 7):
        best = min(seconds for seconds, need in every if need <= limit)
        chosen = chosen_of(case, [limit])
        taken = sum(layers[i].f for i in chosen)
        assert taken >= best
        for index in chosen:
            assert needs(case, chosen - {index})[0] > limit, f"layer {index} for nothing"
        ratios.append(taken / best)
    assert sum(ratios) / len(ratios) < 1.1


def test_recomputing_adds_f_to_b_and_keeps_the_input():
    layers = (
        LayerCost(1, 2, 3, 0, 0, 0, 0, 50, 30, 20),
        LayerCost(1, 2, 3, 0, 0, 0, 0, 50, 30, 10),
        LayerCost(5, 0, 0, 0, 0, 0, 0, 0, 0, 7),
    )
    recomputed = with_recompute(layers, {0, 1, 2})
    assert [x.b for x in recomputed] == [3, 3, 0], "a layer without a backward does not run twice"
    assert [x.activation_bytes for x in recomputed] == [20, 20, 0]
    assert [x.stash_bytes for x in recomputed] == [30, 30, 0], "what W needs is there again after B"
    assert with_recompute(layers, ()) == layers
