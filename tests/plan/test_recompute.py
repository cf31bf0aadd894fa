from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynmo.cost.layer_cost import LayerCost
from dynmo.errors import PartitionError
from dynmo.plan.recompute import choose_recomputed, recompute_memory, with_recompute
from dynmo.schedule.automatic.make import make
from dynmo.schedule.memory import rank_memory
from dynmo.schedule.op import Kind, Schedule

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


def replayed(
    layers: tuple[LayerCost, ...],
    chosen: frozenset[int],
    counts: tuple[int, ...],
    schedule: Schedule,
    replicas: int = 1,
) -> list[int]:
    """The peak of each rank, layer by layer. Replicas need a layer's gradients three times."""
    bounds = [sum(counts[:s]) for s in range(len(counts) + 1)]
    kept = with_recompute(layers, chosen)
    peaks: list[int] = []
    for rank, row in enumerate(schedule.ops):
        own = [i for s in schedule.stages_of(rank) for i in range(bounds[s], bounds[s + 1])]
        live = peak = sum(layers[i].static_bytes for i in own)
        last = {op.stage: at for at, op in enumerate(row)}
        summed = 0
        for at, op in enumerate(row):
            stage = range(bounds[op.stage], bounds[op.stage + 1])
            if op.kind is Kind.F:
                live += sum(kept[i].activation_bytes for i in stage)
            elif op.kind is Kind.W:
                live -= sum(kept[i].stash_bytes for i in stage)
            else:
                for i in reversed(stage):
                    live += layers[i].activation_bytes - kept[i].activation_bytes  # its own F again
                    peak = max(peak, live + summed)
                    live -= layers[i].activation_bytes
                    live += kept[i].stash_bytes if op.kind is Kind.B else 0
            if replicas > 1 and at == last[op.stage]:
                summed = max(summed, *(3 * layers[i].gradient_bytes for i in stage))
            peak = max(peak, live + summed)
        peaks.append(peak)
    return peaks


@given(cases(), st.data())
def test_memory_matches_a_replay_by_layer(
    case: tuple[tuple[LayerCost, ...], tuple[int, ...], Schedule], data: st.DataObject
):
    layers, counts, schedule = case
    chosen = frozenset(data.draw(st.sets(st.integers(0, len(layers) - 1))))
    replicas = data.draw(st.integers(1, 2))
    needs = recompute_memory(layers, chosen, counts, schedule, replicas)
    assert list(needs) == replayed(layers, chosen, counts, schedule, replicas)
    # Without messages, as it runs (an adjacent B and W are one), no more is needed.
    silent = [replace(layer, output_bytes=0) for layer in layers]
    least = rank_memory(silent, counts, schedule)
    whole = recompute_memory(layers, (), counts, schedule)
    assert all(a <= b for a, b in zip(least, whole, strict=True))
    # Recomputing one more layer needs no more memory.
    one_more = {*chosen, data.draw(st.integers(0, len(layers) - 1))}
    more = recompute_memory(layers, one_more, counts, schedule, replicas)
    assert all(a <= b for a, b in zip(more, needs, strict=True))


@given(cases(), st.data())
def test_chosen_layers_fit_and_are_all_needed(
    case: tuple[tuple[LayerCost, ...], tuple[int, ...], Schedule], data: st.DataObject
):
    layers, counts, schedule = case
    least = recompute_memory(layers, range(len(layers)), counts, schedule)
    most = recompute_memory(layers, (), counts, schedule)
    limits = [data.draw(st.integers(low, high)) for low, high in zip(least, most, strict=True)]
    chosen = choose_recomputed(layers, counts, schedule, limits)

    def fits(some: frozenset[int]) -> bool:
        needs = recompute_memory(layers, some, counts, schedule)
        return all(need <= limit for need, limit in zip(needs, limits, strict=True))

    assert fits(chosen)
    for index in chosen:
        assert not fits(chosen - {index}), f"layer {index} for nothing"
    if limits == list(most):
        assert not chosen
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    limits[rank] = least[rank] - 1
    with pytest.raises(PartitionError, match=f"rank {rank} needs {least[rank]} bytes"):
        choose_recomputed(layers, counts, schedule, limits)


def test_recompute_time_is_close_to_the_minimum():
    """The choice is a knapsack problem, so greedy is not always optimal."""
    layers = tuple(
        LayerCost(f, 2.0, 1.0, 0, 1, 1, 2, a, 1, 2)
        for f, a in zip((3, 1, 4, 1, 5, 9, 2, 6, 5), range(8, 26, 2), strict=True)
    )
    schedule = make("gpipe", 1, 3)
    (low,) = recompute_memory(layers, range(9), (9,), schedule)
    (high,) = recompute_memory(layers, (), (9,), schedule)
    every = [
        (sum(layers[i].f for i in chosen), recompute_memory(layers, chosen, (9,), schedule)[0])
        for count in range(10)
        for chosen in combinations(range(9), count)
    ]
    ratios: list[float] = []
    for limit in range(low, high, 7):
        best = min(seconds for seconds, need in every if need <= limit)
        taken = sum(layers[i].f for i in choose_recomputed(layers, (9,), schedule, limit))
        assert taken >= best
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
    with pytest.raises(PartitionError, match="2 memory limits for 1 ranks"):
        choose_recomputed(layers, (3,), make("1f1b", 1, 2), (1, 2))
    with pytest.raises(PartitionError, match="2 layers on 1 stages, for 3 layers"):
        recompute_memory(layers, (), (2,), make("1f1b", 1, 2))
