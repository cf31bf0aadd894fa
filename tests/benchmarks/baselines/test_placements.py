"""Placement algorithms of other systems, as published, with their known defects."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given

from benchmarks.baselines import placements
from benchmarks.baselines.placements import (
    Transfers,
    balanced_bounds,
    in_order,
    megatron_placement,
    placement,
    probe,
    published_diffusion,
    type_bounds,
    uniform_bounds,
)
from dynmo.cost.layer_cost import LayerCost
from dynmo.errors import PartitionError
from dynmo.plan.bisection import exact
from dynmo.plan.partition import Partition, stage_loads
from tests.plan.test_balancers import FROZEN, ONE, Now, cases, limited, many, now

NAMES = (
    "embedding",
    *(f"blocks.{i}.{half}" for i in range(8) for half in ("attention", "feed_forward")),
    "head",
)


def test_deepspeed_uniform_has_the_published_counts():
    assert uniform_bounds(10, 4) == [0, 3, 6, 8, 10]
    assert uniform_bounds(8, 4) == [0, 2, 4, 6, 8]
    # Older versions gave the remainder to the last stage: 7 layers there, 2 elsewhere.
    assert uniform_bounds(47, 20, rest_last=True)[-3:] == [36, 38, 47]


def test_deepspeed_is_optimal_if_its_tolerance_is_small():
    for weights, parts in (
        ([3, 1, 4, 1, 5, 9, 2, 6], 3),
        ([10.0] * 12, 4),
        ([100, 300, 200, 400, 100, 100], 2),
    ):
        partition = placement(balanced_bounds(weights, parts), "DeepSpeed's")
        best = max(stage_loads(weights, exact(weights, parts)))
        assert max(stage_loads(weights, partition)) == best


def test_deepspeed_in_seconds_stops_too_early():
    # The same layers in milliseconds and in seconds: only the number of the tolerance, 1e-3, is the
    # same.
    milliseconds = [2.1, 1.2, 1.3, 2.7, 2.7, 2.7, 1.9, 2.5, 1.7, 2.0]
    seconds = [x / 1000 for x in milliseconds]
    best = max(stage_loads(milliseconds, exact(milliseconds, 4)))

    def excess(weights: list[float], unit: float) -> float:
        partition = placement(balanced_bounds(weights, 4), "DeepSpeed's")
        return max(stage_loads(weights, partition)) / unit / best - 1

    assert excess(milliseconds, 1.0) < 0.001
    assert excess(seconds, 1e-3) > 0.08
    assert max(stage_loads(seconds, exact(seconds, 4))) == pytest.approx(best / 1000)


def test_deepspeed_leaves_stages_empty():
    # A first layer as heavy as the bottleneck does not get under it, so the first stage stays
    # empty.
    bounds = balanced_bounds([5, 1, 1, 1, 1], 3)
    assert any(start == stop for start, stop in pairwise(bounds))
    assert max(stage_loads([5, 1, 1, 1, 1], exact([5, 1, 1, 1, 1], 3))) == 5
    with pytest.raises(PartitionError, match="leaves stage 0 without a layer"):
        placement(bounds, "DeepSpeed's placement")
    assert balanced_bounds([1.0] * 3, 5) == [0, 1, 2, 3, 3, 3]


def test_deepspeed_refuses_an_exact_fit():
    # Two stages of 2 have the bottleneck 2, but the probe wants less than that.
    assert not probe([1, 2, 3, 4], 2, 2.0)[1]
    assert probe([1, 2, 3, 4], 2, 2.001) == ([0, 2, 4], True)


def test_deepspeed_with_fewer_layers_than_stages_is_refused():
    with pytest.raises(PartitionError, match="never ends for 3 layers on 5 stages"):
        probe([1.0, 2.0, 3.0], 5, 1.0)


def test_deepspeed_ends_with_a_tolerance_below_rounding():
    assert balanced_bounds([1e20, 3e20, 2e20, 1e20], 2) == [0, 2, 4]


def test_deepspeed_places_layers_by_type():
    assert type_bounds(NAMES, "attention", 4) == [0, 5, 9, 13, 18]
    with pytest.raises(PartitionError, match="type:conv is found in no layer's name"):
        type_bounds(NAMES, "conv", 4)
    with pytest.raises(PartitionError, match="not a regular expression"):
        type_bounds(NAMES, "(", 4)


def test_megatron_places_blocks_evenly():
    assert megatron_placement(NAMES, 4).counts == (5, 4, 4, 5)
    assert megatron_placement(NAMES, 5, embedding=True, loss=True).counts == (3, 4, 4, 4, 3)
    assert megatron_placement(NAMES, 3, embedding=True).counts == (5, 6, 7)
    # Counted as a block, the embedding can be all that its stage has.
    assert megatron_placement(NAMES, 10, embedding=True, loss=True).counts == (1, *(2,) * 8, 1)
    with pytest.raises(PartitionError, match="3 stages, not 8 blocks"):
        megatron_placement(NAMES, 3)
    with pytest.raises(PartitionError, match="8 blocks and the embedding"):
        megatron_placement(NAMES, 4, embedding=True)
    with pytest.raises(PartitionError, match="stage 0 without a layer"):
        megatron_placement(NAMES[1:], 10, embedding=True, loss=True)


def test_algorithm_3_rarely_keeps_the_layer_order():
    # The lightest layer of rank 0 happens to be its last, and rank 1 the least loaded.
    lucky = published_diffusion([3.0, 3.0, 1.0, 2.0], Partition((3, 1)))
    assert lucky.ranks == ((0, 1), (3, 2))
    assert in_order(lucky).counts == (2, 2)
    with pytest.raises(PartitionError, match="rank 1"):
        in_order(Transfers(((0, 1), ()), ()))


def test_each_baseline():
    by_count = ("deepspeed_uniform", "deepspeed_parameters", "megatron_uniform")
    by_time = ("deepspeed_time", "algorithm_3")
    for names, counts in (((*by_count, "megatron_embedding_loss"), (3, 3)), (by_time, (4, 2))):
        for name in names:
            assert getattr(placements, name)(*now(FROZEN, (4, 2))).counts == counts, name


def drawn_from(
    layers: Sequence[LayerCost], counts: tuple[int, ...], **known: Any
) -> tuple[int, ...]:
    return placements.random(*now(layers, counts, **known)).counts


def test_random_draws_every_other_placement():
    drawn = Counter(drawn_from([ONE] * 5, (2, 1, 2), seed=3, step=step) for step in range(500))
    assert set(drawn) == {(1, 1, 3), (1, 2, 2), (1, 3, 1), (2, 2, 1), (3, 1, 1)}
    assert min(drawn.values()) > 60  # 100 each on average
    for counts in ((5,), (1,) * 5):
        assert drawn_from([ONE] * 5, counts) == counts
    a, b = (
        [drawn_from([ONE] * 5, (2, 1, 2), seed=seed, step=step) for step in range(20)]
        for seed in (0, 1)
    )
    assert a != b


def test_random_is_the_same_on_every_machine():
    assert drawn_from([ONE] * 50, (10,) * 5, seed=1, step=2) == (14, 3, 5, 10, 18)


def test_random_draws_only_placements_that_fit():
    # Stage 1 cannot hold layer 2. The current partition is not drawn.
    for current, expected in (((1, 1, 3), {(3, 1, 1)}), ((2, 1, 2), {(3, 1, 1), (1, 1, 3)})):
        asked = (limited([1, 1, 5, 1, 1], current, (10, 2, 10), step=step) for step in range(100))
        assert {placements.random(*each).counts for each in asked} == expected


def forward_only(seconds: Sequence[float], *counts: int) -> Now:
    return now([LayerCost(f, 0.0, 0.0) for f in seconds], counts)


def test_impossible_baseline_placements_are_refused():
    heavy = forward_only((5, 1, 1, 1, 1), 3, 1, 1)
    with pytest.raises(PartitionError, match="DeepSpeed's placement by time leaves stage 0"):
        placements.deepspeed_time(*heavy)
    with pytest.raises(PartitionError, match="not 5 blocks"):
        placements.megatron_uniform(*heavy)
    with pytest.raises(PartitionError, match="rank 0"):
        placements.algorithm_3(*forward_only((4, 3, 2, 2, 1, 1, 2), 3, 2, 2))


def test_deepspeed_type_balances_by_layer_name():
    asked = now([ONE] * len(NAMES), (9, 9), names=NAMES)
    assert placements.deepspeed_type("ATTENTION")(*asked).counts == (9, 9)
    assert placements.megatron_uniform(*asked).counts == (9, 9)


def variance(loads: list[float]) -> float:
    return sum(x * x for x in loads) / len(loads) - (sum(loads) / len(loads)) ** 2


@many
@given(cases())
def test_algorithm_3_lowers_the_variance_with_every_transfer(case: tuple[list[float], Partition]):
    weights, current = case
    transfers = published_diffusion(weights, current)
    held = [list(current.range_of(rank)) for rank in range(current.stages)]
    spread = [variance([sum(weights[layer] for layer in rank) for rank in held])]
    for layer, source, target in transfers.moves:
        held[source].remove(layer)
        held[target].append(layer)
        spread.append(variance([sum(weights[layer] for layer in rank) for rank in held]))
    assert all(after < before for before, after in pairwise(spread))
    assert transfers.ranks == tuple(map(tuple, held))


def test_algorithm_3_breaks_the_order_of_the_layers():
    # Its known fault: perfectly even loads, on ranks whose layers are no longer neighbours.
    weights = [4.0, 3.0, 2.0, 2.0, 1.0, 1.0, 2.0]
    transfers = published_diffusion(weights, Partition((3, 2, 2)))
    assert transfers.moves == ((2, 0, 1), (1, 0, 2), (5, 2, 0))
    assert transfers.ranks == ((0, 5), (3, 4, 2), (6, 1))
    assert [sum(weights[layer] for layer in rank) for rank in transfers.ranks] == [5.0, 5.0, 5.0]
    with pytest.raises(PartitionError, match="rank 0 with the layers"):
        in_order(transfers)


def test_algorithm_3_keeps_memory_limits_and_iterations():
    weights, current = [1.0] * 6, Partition((5, 1))
    assert len(published_diffusion(weights, current).ranks[1]) == 3
    assert len(published_diffusion(weights, current, iterations=1).ranks[1]) == 2
    tight = published_diffusion(weights, current, layer_bytes=[4] * 6, limits=[99, 8])
    assert len(tight.ranks[1]) == 2
    with pytest.raises(PartitionError, match="both"):
        published_diffusion(weights, current, limits=[99, 8])


def test_algorithm_3_compares_with_the_current_variance():
    # The loads are 20, 18 and 1. Two of them are over the mean. The first transfer makes them 10 18
    # 11. The second would make them 19 9 11, which is better than the start of the iteration and
    # worse than now.
    weights = [10.0, 10.0, 9.0, 9.0, 1.0]
    current = Partition((2, 2, 1))
    transfers = published_diffusion(weights, current, iterations=1)
    assert transfers.moves == ((0, 0, 2),)
