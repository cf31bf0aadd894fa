"""Placements with several stages per rank, compared with all placements."""

import random
from itertools import combinations, pairwise

import pytest

from benchmarks.cost_traces import trace
from dynmo.cost.layer_cost import LayerCost
from dynmo.errors import PartitionError
from dynmo.plan.chunks import chunked, flow_bound, flowing
from dynmo.plan.partition import Partition, exact, stage_loads
from dynmo.plan.stage_costs import frozen_stages, pipeline_costs
from dynmo.schedule.automatic.vshape import v_shape
from dynmo.schedule.memory import MemoryLimits
from dynmo.schedule.simulator import simulate


def looped(ranks: int, chunks: int) -> tuple[int, ...]:
    return tuple(range(ranks)) * chunks


def v_shaped(ranks: int) -> tuple[int, ...]:
    return (*range(ranks), *reversed(range(ranks)))


def largest(
    weights: list[float], bounds: tuple[int, ...], placement: tuple[int, ...], speeds: list[float]
) -> float:
    load = [0.0] * len(speeds)
    for rank, (start, stop) in zip(placement, pairwise(bounds), strict=True):
        load[rank] += sum(weights[start:stop])
    return max(x / v for x, v in zip(load, speeds, strict=True))


def fits(memory: MemoryLimits | None, bounds: tuple[int, ...], placement: tuple[int, ...]) -> bool:
    if memory is None:
        return True
    room = dict(zip(placement, memory.limits, strict=True))
    for stage, (start, stop) in enumerate(pairwise(bounds)):
        room[placement[stage]] -= memory.need(stage, start, stop)
    return min(room.values()) >= 0


@pytest.mark.parametrize("cases", [10, pytest.param(25, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize(
    ("placement", "layers"),
    [
        *((v_shaped(p), 10) for p in (2, 3)),
        *((looped(p, 2), 11) for p in (2, 3)),
        (looped(2, 3), 10),
    ],
)
def test_search_equals_brute_force(
    placement: tuple[int, ...], layers: int, limited: bool, cases: int
):
    draw = random.Random(f"{placement} {limited}")
    feasible = 0
    for case in range(cases):
        weights = [float(draw.randint(0, 9)) for _ in range(layers)]
        speeds = [
            draw.choice([0.5, 1.0, 2.0]) if case % 2 else 1.0 for _ in range(max(placement) + 1)
        ]
        memory = None
        if limited:
            sizes = [(draw.randint(1, 5), draw.randint(0, 3)) for _ in weights]
            costs = tuple(LayerCost(0, 0, 0, weight_bytes=x, activation_bytes=y) for x, y in sizes)
            limit = [draw.randint(40, 75) for _ in speeds]
            resident = tuple(((draw.randint(1, 3), 0),) for _ in placement)
            memory = MemoryLimits(costs, resident, tuple(limit[r] for r in placement))
        every = ((0, *cuts, layers) for cuts in combinations(range(1, layers), len(placement) - 1))
        best = min(
            (largest(weights, x, placement, speeds) for x in every if fits(memory, x, placement)),
            default=None,
        )
        if best is None:
            with pytest.raises(PartitionError, match=r"no placement fits .* bytes over"):
                chunked(weights, placement, memory=memory, speeds=speeds)
            continue
        feasible += 1
        result = chunked(weights, placement, memory=memory, speeds=speeds)
        assert result.proven
        bounds = result.partition.bounds
        assert result.seconds == pytest.approx(best, rel=1e-12)
        assert largest(weights, bounds, placement, speeds) == pytest.approx(best, rel=1e-12)
        assert fits(memory, bounds, placement)
    assert feasible > (cases // 5 if limited else cases - 1)


def test_one_stage_per_rank_is_exact():
    weights = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0]
    result = chunked(weights, (0, 1, 2))
    assert (result.partition, result.seconds, result.proven) == (exact(weights, 3), 14.0, True)
    # In another order of ranks, a rank's speed follows it.
    assert chunked(weights, (2, 0, 1), speeds=[1.0, 2.0, 4.0]).partition == exact(
        weights, 3, speeds=[4.0, 1.0, 2.0]
    )


def test_several_stages_even_out_a_heavy_layer():
    # One stage per rank cannot: 8 | 1 1 1 1 | 1 1 1 1. The V can: rank 0 has the heavy layer and
    # nothing more than it must.
    weights = [5.0, *[1.0] * 8]
    result = chunked(weights, v_shaped(2))
    assert result.seconds == 7.0
    assert result.partition.counts[0] == 1
    assert result == chunked(weights, v_shaped(2))


@pytest.mark.parametrize("placement", [looped(4, 2), looped(3, 3), (0, 1, 2, 3, 1, 0, 2, 3)])
def test_descent_alone_is_close_to_the_optimum(placement: tuple[int, ...]):
    """Within 3 % of the optimum on average and 12 % at worst, without branch and bound."""
    draw = random.Random(str(placement))
    over: list[float] = []
    for _ in range(8):
        weights = [draw.uniform(0.5, 1.5) for _ in range(16)]
        best = chunked(weights, placement)
        assert best.proven
        quick = chunked(weights, placement, nodes=0)
        assert not quick.proven
        over.append(quick.seconds / best.seconds - 1)
    assert min(over) >= -1e-12
    assert sum(over) / len(over) < 0.03
    assert max(over) < 0.12


def test_many_layers_are_within_3_percent_of_the_ideal():
    draw = random.Random(0)
    weights = [draw.uniform(0.5, 1.5) for _ in range(98)]
    ideal = sum(weights) / 12
    for placement in (v_shaped(12), looped(12, 2)):
        result = chunked(weights, placement)
        assert result.seconds <= ideal * 1.03
        chain = exact(weights, len(placement))
        assert result.seconds <= largest(weights, chain.bounds, placement, [1.0] * 12)


def test_placement_stays_without_a_gain():
    weights, current = [1.0] * 8, Partition((1, 3, 1, 3))
    assert chunked(weights, v_shaped(2), current=current).partition == current
    assert max(stage_loads(weights, chunked(weights, v_shaped(2)).partition)) <= 3.0


def test_bad_placements_are_refused():
    with pytest.raises(PartitionError, match="must name the ranks 0 to 2"):
        chunked([1.0] * 8, (0, 2))
    with pytest.raises(PartitionError, match="must name"):
        chunked([1.0] * 8, ())
    with pytest.raises(PartitionError, match=r"4 ranks .* 3"):
        chunked([1.0] * 3, (0, 1, 1, 0))
    with pytest.raises(PartitionError, match="same model"):
        chunked([1.0] * 8, (0, 1, 1, 0), current=Partition((7,)))
    with pytest.raises(PartitionError, match="3 speeds for 2 ranks"):
        chunked([1.0] * 8, (0, 1, 1, 0), speeds=[1.0] * 3)
    with pytest.raises(PartitionError, match="2 stages, but 4 in the placement"):
        chunked(
            [1.0] * 8,
            (0, 1, 1, 0),
            memory=MemoryLimits((LayerCost(0, 0, 0),) * 8, ((), ()), (1, 1)),
        )


def frozen_half() -> tuple[LayerCost, ...]:
    """24 layers that are frozen and 24 that train, of different sizes."""
    sizes = [1.0, 1.3] * 24
    return tuple(
        LayerCost(x, 0.0, 0.0) if i < 24 else LayerCost(x, x, x, activation_bytes=1, weight_bytes=1)
        for i, x in enumerate(sizes)
    )


@pytest.mark.matrix
def test_flowing_placements_take_less_time_than_even_loads() -> None:
    ranks, m, layers = 24, 48, trace("freezing", 48, 2048)[18]
    placement = v_shaped(ranks)

    def span(partition: Partition) -> float:
        costs = pipeline_costs(layers, partition)
        return simulate(
            v_shape("v-auto", costs, m, first_trainable=frozen_stages(costs)), costs
        ).span

    found = flowing(layers, placement, m)
    even = chunked([x.seconds for x in layers], placement).partition
    assert min(map(span, found)) < span(even) * 0.97
    assert flowing(layers, placement, m) == found


def test_flowing_placements_fit_the_memory() -> None:
    ranks, m, layers = 4, 8, frozen_half()
    placement = v_shaped(ranks)
    memory = MemoryLimits(layers, (((m, 0),),) * 8, (7 * (m + 1),) * 8)
    found = flowing(layers, placement, m, memory=memory)
    assert found
    assert all(fits(memory, partition.bounds, placement) for partition in found)
    full = MemoryLimits(layers, (((m, 0),),) * 8, (5 * (m + 1),) * 8)
    assert flowing(layers, placement, m, memory=full) == []


def test_flowing_is_for_a_v() -> None:
    assert flowing(frozen_half(), looped(4, 2), 8) == []


@pytest.mark.parametrize("seed", [0, 1, 2, 12, 23, 44])
def test_no_placement_and_schedule_is_below_the_flow_bound(seed: int) -> None:
    draw = random.Random(seed)
    frozen = draw.choice([0, 0, 2, 3])
    layers = [LayerCost(draw.uniform(0.1, 3.0), 0.0, 0.0) for _ in range(frozen)]
    for _ in range(7 - frozen):
        f, b, w = draw.uniform(0.1, 3.0), draw.choice([0.2, 2.0]), draw.choice([0.2, 2.0])
        layers.append(LayerCost(f, b, w))
    m = draw.randint(1, 5)
    bound = flow_bound(layers, 2, m)
    spans = list[float]()
    for inner in combinations(range(1, 7), 3):
        costs = pipeline_costs(layers, Partition.from_bounds((0, *inner, 7)))
        schedule = v_shape("v-auto", costs, m, first_trainable=frozen_stages(costs))
        spans.append(simulate(schedule, costs).span)
    assert bound <= min(spans) * (1 + 1e-9)
    assert bound >= m * sum(layer.seconds for layer in layers) / 2 * (1 - 1e-9)
