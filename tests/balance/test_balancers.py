"""Tests of the balancers in the registry: placements, limits, purity and errors."""

from collections import Counter
from dataclasses import replace

import pytest

from dynmo.balance.balancers import BALANCERS, BalanceRequest, balancer
from dynmo.balance.partition import Partition, stage_loads
from dynmo.balance.stage_costs import by_name, pipeline_costs
from dynmo.cost.layer_cost import LayerCost
from dynmo.errors import PartitionError
from dynmo.schedule.simulator import simulate

# The first three layers are frozen: forward only, but as many parameters as the others.
FROZEN = tuple(LayerCost(1.0, 0.0, 0.0, parameters=10) for _ in range(3)) + tuple(
    LayerCost(1.0, 1.0, 1.0, parameters=10) for _ in range(3)
)
REQUEST = BalanceRequest(FROZEN, Partition((4, 2)), make=by_name("zb-h1", 4))


def limited(sizes: list[int], current: tuple[int, ...], limit: tuple[int, ...]) -> BalanceRequest:
    layers = tuple(LayerCost(1.0, 1.0, 1.0, weight_bytes=size) for size in sizes)
    return BalanceRequest(
        layers, Partition(current), resident=((),) * len(limit), memory_limit=limit
    )


def test_each_balancer():
    placements = {
        name: balance(REQUEST).counts for name, balance in BALANCERS.items() if name != "random"
    }
    # By time 1 1 1 3 3 3: three and one layer of 3 against two of 3. The current placement is one
    # of the best already.
    by_count = dict.fromkeys(
        (
            "uniform",
            "deepspeed-uniform",
            "deepspeed-parameters",
            "megatron-uniform",
            "megatron-embedding-loss",
        ),
        (3, 3),
    )
    by_time = dict.fromkeys(
        ("none", "exact", "schedule-aware", "diffusion", "deepspeed-time", "algorithm-3"), (4, 2)
    )
    assert placements == by_count | by_time


def test_balancing_by_parameters_ignores_freezing():
    blind = replace(REQUEST, cost="parameters")
    assert balancer("exact")(blind).counts == balancer("diffusion")(blind).counts == (3, 3)


def test_exact_moves_the_fewest_bytes():
    # Layer 0 decides alone. (1, 3, 1) moves layer 1. The smoother (1, 2, 2) moves layer 3 too.
    layers = tuple(
        LayerCost(f, 0.0, 0.0, optimizer_bytes=size)
        for f, size in ((6, 1), (1, 5), (1, 1), (1, 1), (1, 1))
    )
    request = BalanceRequest(layers, Partition((2, 2, 1)))
    assert balancer("exact")(request).counts == (1, 3, 1)
    free = tuple(
        replace(layer, optimizer_bytes=size)
        for layer, size in zip(layers, (1, 5, 0, 0, 0), strict=True)
    )
    assert balancer("exact")(replace(request, layers=free)).counts == (1, 2, 2)
    # Layers are counted if no bytes are given.
    unknown = tuple(replace(layer, optimizer_bytes=0) for layer in layers)
    assert balancer("exact")(replace(request, layers=unknown)).counts == (1, 3, 1)


@pytest.mark.parametrize("name", BALANCERS)
def test_every_balancer_is_pure_and_keeps_the_number_of_ranks(name: str):
    for step in range(5):
        request = replace(REQUEST, step=step)
        partition = balancer(name)(request)
        assert partition == balancer(name)(replace(REQUEST, step=step))
        assert (partition.layers, partition.stages) == (6, 2)


def test_random_draws_every_other_placement():
    layers = tuple(LayerCost(1.0, 1.0, 1.0) for _ in range(5))
    current = Partition((2, 1, 2))
    drawn = Counter(
        balancer("random")(BalanceRequest(layers, current, seed=3, step=step)).counts
        for step in range(500)
    )
    assert set(drawn) == {(1, 1, 3), (1, 2, 2), (1, 3, 1), (2, 2, 1), (3, 1, 1)}
    assert min(drawn.values()) > 60  # 100 each on average
    steps = range(20)
    a, b = (
        [
            balancer("random")(BalanceRequest(layers, current, seed=seed, step=step))
            for step in steps
        ]
        for seed in (0, 1)
    )
    assert a != b


def test_random_is_the_same_on_every_machine():
    layers = tuple(LayerCost(1.0, 1.0, 1.0) for _ in range(50))
    assert balancer("random")(
        BalanceRequest(layers, Partition((10,) * 5), seed=1, step=2)
    ).counts == (14, 3, 5, 10, 18)


def test_random_keeps_the_only_placement():
    layers = tuple(LayerCost(1.0, 1.0, 1.0) for _ in range(3))
    for counts in ((3,), (1, 1, 1)):
        assert balancer("random")(BalanceRequest(layers, Partition(counts))).counts == counts


def test_random_draws_only_placements_that_fit():
    request = limited([1, 1, 5, 1, 1], (1, 1, 3), (10, 2, 10))
    drawn = {balancer("random")(replace(request, step=step)).counts for step in range(100)}
    # Stage 1 cannot hold layer 2. (1, 1, 3) is the current partition.
    assert drawn == {(3, 1, 1)}
    unfit = replace(request, current=Partition((2, 1, 2)))
    assert {balancer("random")(replace(unfit, step=step)).counts for step in range(100)} == {
        (3, 1, 1),
        (1, 1, 3),
    }


def test_balancers_keep_memory_limits():
    request = limited([4, 4, 1, 1], (1, 3), (5, 99))
    assert balancer("exact")(request).counts == (1, 3)
    assert balancer("diffusion")(request).counts == (1, 3)
    assert balancer("none")(replace(request, current=Partition((3, 1)))).counts == (3, 1)
    with pytest.raises(PartitionError, match=r"stage 0 .* needs 8 bytes, its limit is 5"):
        balancer("uniform")(request)
    with pytest.raises(PartitionError, match="stage 0"):
        balancer("exact")(limited([9, 9], (1, 1), (1, 9)))
    assert balancer("uniform")(replace(request, resident=None, memory_limit=None)).counts == (2, 2)


def test_inconsistent_requests_are_refused():
    with pytest.raises(PartitionError, match="5 layers for 6 layer costs"):
        BalanceRequest(FROZEN, Partition((4, 1)))
    with pytest.raises(PartitionError, match="resident"):
        BalanceRequest(FROZEN, Partition((4, 2)), memory_limit=(1, 1))
    with pytest.raises(PartitionError, match="3 memory limits for 2 ranks"):
        BalanceRequest(FROZEN, Partition((4, 2)), resident=((), ()), memory_limit=(1, 1, 1))
    with pytest.raises(PartitionError, match="1 resident stages for 2 ranks"):
        BalanceRequest(FROZEN, Partition((4, 2)), resident=((),), memory_limit=(1, 1))


def test_faster_rank_gets_more_layers():
    even = BalanceRequest(
        tuple(LayerCost(1.0, 1.0, 1.0) for _ in range(6)), Partition((3, 3)), speeds=(1.0, 2.0)
    )
    assert balancer("exact")(even).counts == (2, 4)
    assert balancer("schedule-aware")(replace(even, make=by_name("1f1b", 8))).counts == (2, 4)


def test_exact_balances_several_stages_per_rank():
    heavy = BalanceRequest(
        tuple(LayerCost(f, 0.0, 0.0) for f in (5, 1, 1, 1, 1, 1, 1, 1, 1)),
        Partition((3, 2, 2, 2)),
        stage_ranks=(0, 1, 1, 0),
    )
    partition = balancer("exact")(heavy)
    assert (
        max(
            partition.counts[0] + 4 + partition.counts[3], partition.counts[1] + partition.counts[2]
        )
        == 7
    )
    with pytest.raises(PartitionError, match="placement of 2 stages on ranks for 4 stages"):
        replace(heavy, stage_ranks=(0, 1))


def test_exact_breaks_ties_by_the_simulated_time():
    # Layer 0 decides the bottleneck, so the others are divided freely. (1, 2, 5) takes an eighth
    # longer than (1, 3, 4).
    layers = (LayerCost(5.0, 5.0, 5.0), *(LayerCost(1.0, 1.0, 1.0) for _ in range(7)))
    request = BalanceRequest(layers, Partition((1, 2, 5)))
    make = by_name("1f1b", 4)
    assert balancer("exact")(request) == request.current  # nothing needs to move
    seeing = balancer("exact")(replace(request, make=make))
    assert seeing.counts == (1, 3, 4)
    assert max(stage_loads(request.weights, seeing)) == 15.0

    def span(partition: Partition) -> float:
        costs = pipeline_costs(layers, partition)
        return simulate(make(costs), costs).span

    assert (span(request.current), span(seeing)) == (81.0, 72.0)
    # By parameters nothing is simulated.
    assert balancer("exact")(replace(request, make=make, cost="parameters")) == balancer("exact")(
        replace(request, cost="parameters")
    )


def test_schedule_aware_needs_a_schedule():
    with pytest.raises(PartitionError, match="'schedule-aware'"):
        balancer("schedule-aware")(replace(REQUEST, make=None))


def test_impossible_baseline_placements_are_refused():
    heavy = BalanceRequest(
        tuple(LayerCost(f, 0.0, 0.0) for f in (5, 1, 1, 1, 1)), Partition((3, 1, 1))
    )
    with pytest.raises(PartitionError, match="DeepSpeed's placement by time leaves stage 0"):
        balancer("deepspeed-time")(heavy)
    with pytest.raises(PartitionError, match="not 5 blocks"):
        balancer("megatron-uniform")(heavy)
    with pytest.raises(PartitionError, match="rank 0"):
        balancer("algorithm-3")(
            BalanceRequest(
                tuple(LayerCost(f, 0.0, 0.0) for f in (4, 3, 2, 2, 1, 1, 2)), Partition((3, 2, 2))
            )
        )
    with pytest.raises(PartitionError, match="stage 1 of the placement"):
        balancer("deepspeed-uniform")(limited([4, 4, 4, 4], (3, 1), (99, 5)))


def test_deepspeed_type_balances_by_layer_name():
    names = (
        "embedding",
        *(f"blocks.{i}.{half}" for i in range(4) for half in ("attention", "feed_forward")),
        "head",
    )
    layers = tuple(LayerCost(1.0, 1.0, 1.0) for _ in names)
    request = BalanceRequest(layers, Partition((5, 5)), names=names)
    assert balancer("deepspeed-type:ATTENTION")(request).counts == (5, 5)
    assert balancer("megatron-uniform")(request).counts == (5, 5)
    with pytest.raises(PartitionError, match="9 names for 10 layers"):
        replace(request, names=names[1:])


def test_unknown_balancer_name_is_refused():
    with pytest.raises(PartitionError, match=r"'exat'; choose one of .*exact"):
        balancer("exat")
