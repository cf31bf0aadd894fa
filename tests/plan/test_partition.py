"""Placements and the exact partitioner, which is compared with all placements."""

import json
import math
import random
import re
from collections.abc import Callable
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynmo.cost.layer_cost import LayerCost, LinkCost
from dynmo.errors import PartitionError
from dynmo.plan.chains import integer_sums, tie_unit
from dynmo.plan.partition import (
    Move,
    Partition,
    exact,
    imbalance,
    moves,
    stage_loads,
    uniform,
    weigh,
)
from dynmo.schedule.memory import MemoryLimits

many = settings(derandomize=True)


def every_placement(layers: int, ranks: int) -> list[tuple[int, ...]]:
    """The bounds of every contiguous placement without an empty stage."""
    return [(0, *cuts, layers) for cuts in combinations(range(1, layers), ranks - 1)]


def best_of(
    weights: list[float],
    every: list[tuple[int, ...]],
    current: Partition | None = None,
    sizes: list[int] | None = None,
    speeds: list[float] | None = None,
    sends: Callable[[int, int], float] = lambda stage, stop: 0.0,
) -> tuple[int, ...]:
    """The goals that `exact` promises to minimise, in its order."""
    layers, ranks = len(weights), len(every[0]) - 1
    rates, sums = speeds or [1.0] * ranks, integer_sums(weights)
    step = math.fsum(weights) / sums[-1] if sums[-1] else 1.0

    def send(stage: int, stop: int) -> float:
        return sends(stage, stop) / step

    def time(stage: int, a: int, b: int) -> float:
        return (sums[b] - sums[a]) / rates[stage] + send(stage, b)

    least = min(
        max(time(stage, a, b) for stage, (a, b) in enumerate(pairwise(bounds))) for bounds in every
    )
    # The unit in which ties are compared.
    most = max(
        (least - send(s, b)) * x for s, x in enumerate(rates) for b in range(1, max(2, layers))
    )
    unit = tie_unit(int(max(least * min(rates), min(sums[-1], most))), ranks)
    loads = [(b - a) // unit for a, b in pairwise(sums)]

    def rest(bounds: tuple[int, ...]) -> tuple[object, ...]:
        new = Partition.from_bounds(bounds)
        moved = sum((sizes or [1] * layers)[m.layer] for m in moves(current, new)) if current else 0
        times = [
            (sum(loads[a:b]) * round((1 << 30) * min(rates) / rates[s]) >> 30)
            + int(min(send(s, b), least) * min(rates) / unit)
            for s, (a, b) in enumerate(pairwise(bounds))
        ]
        return moved, sum(x * x for x in times), sum(c * c for c in new.counts), bounds[::-1]

    ties = [
        bounds
        for bounds in every
        if all(time(s, a, b) <= least for s, (a, b) in enumerate(pairwise(bounds)))
    ]
    return min(ties, key=rest)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[float], int]:
    # Few distinct values make ties. Any float makes sums that round. Zeros are layers that cost
    # nothing.
    few, rounded = st.sampled_from([0.0, 1.0, 2.0, 3.0]), st.sampled_from([0.1, 0.2, 0.3, 1e-9])
    weight = draw(st.sampled_from([few, st.floats(0, 1e6), rounded]))
    weights = draw(st.lists(weight, min_size=1, max_size=9))
    return weights, draw(st.integers(1, len(weights)))


@st.composite
def placements(draw: st.DrawFn, layers: int, ranks: int | None = None) -> Partition:
    ranks = draw(st.integers(1, layers)) if ranks is None else ranks
    return Partition.from_bounds(draw(st.sampled_from(every_placement(layers, ranks))))


@many
@given(cases(), st.data())
def test_exact_equals_the_best_of_all_placements(
    case: tuple[list[float], int], data: st.DataObject
):
    weights, ranks = case
    layers = len(weights)
    current = data.draw(st.none() | placements(layers))
    sizes = data.draw(st.none() | st.lists(st.integers(0, 3), min_size=layers, max_size=layers))
    best = best_of(weights, every_placement(layers, ranks), current, sizes)
    assert exact(weights, ranks, current=current, move_bytes=sizes).bounds == best


@many
@given(cases(), st.data())
def test_exact_is_optimal_with_speeds_and_links(case: tuple[list[float], int], data: st.DataObject):
    weights, ranks = case
    layers = len(weights)
    speeds = data.draw(
        st.lists(st.sampled_from([1.0, 0.5, 2.0, 0.9, 1.3]), min_size=ranks, max_size=ranks)
    )
    latency, rate = st.sampled_from([0.0, 0.1, 3.0]), st.sampled_from([1.0, 7.0, 1e9])
    links = [LinkCost(data.draw(latency), data.draw(rate)) for _ in range(ranks - 1)]
    sizes = st.lists(st.integers(0, 12), min_size=layers, max_size=layers)
    sent = data.draw(st.just([8] * layers) | sizes)

    def sends(stage: int, stop: int) -> float:
        return links[stage].seconds(sent[stop - 1]) if stage < ranks - 1 else 0.0

    every = every_placement(layers, ranks)
    assert exact(weights, ranks, speeds=speeds).bounds == best_of(weights, every, speeds=speeds)
    partition = exact(weights, ranks, speeds=speeds, links=links, output_bytes=sent)
    assert partition.bounds == best_of(weights, every, speeds=speeds, sends=sends)


@many
@given(cases(), st.data())
def test_exact_is_optimal_under_memory_limits(case: tuple[list[float], int], data: st.DataObject):
    weights, ranks = case
    size = st.integers(0, 4)
    names = ("weight_bytes", "activation_bytes", "stash_bytes")
    drawn = st.builds(LayerCost, *[st.just(0)] * 3, **dict.fromkeys(names, size))
    layers = tuple(data.draw(drawn) for _ in weights)
    pairs = st.lists(st.tuples(size, size), max_size=2).map(tuple)
    resident = tuple(data.draw(pairs) for _ in range(ranks))
    limits = tuple(data.draw(st.integers(0, 60)) for _ in range(ranks))
    memory = MemoryLimits(layers, resident, limits)
    fitting = [
        bounds
        for bounds in every_placement(len(weights), ranks)
        if all(memory.fits(stage, a, b) for stage, (a, b) in enumerate(pairwise(bounds)))
    ]
    if fitting:
        assert exact(weights, ranks, memory=memory).bounds == best_of(weights, fitting)
    else:
        with pytest.raises(PartitionError) as caught:
            exact(weights, ranks, memory=memory)
        # The message names a stage and layers that truly need what it says, over the limit.
        message = str(caught.value)
        numbers = re.search(
            r"needs (\d+) bytes, the limit there is (\d+)|(\d+) bytes needed, the limit is (\d+)",
            message,
        )
        assert numbers is not None, message
        need, limit = (int(x) for x in numbers.groups() if x is not None)
        assert need > limit
        named = re.search(r"stage (\d+)", message.partition("alone on ")[2] or message)
        assert named is not None, message
        assert memory.limits[int(named[1])] == limit


@pytest.mark.parametrize("kind", ["memory", "links", "both"])
def test_exact_equals_bellmans_table_under_memory_limits(kind: str):
    """Only some stages can hold certain layers, and outputs have several sizes."""
    draw = random.Random(kind)
    feasible = 0
    for _ in range(12):
        layers, ranks = 36, 8
        weights = [float(draw.randint(1, 20)) for _ in range(layers)]
        sent = [draw.choice([0, 4, 16]) if kind != "memory" else 0 for _ in range(layers)]
        links = [LinkCost(0.0, 1.0)] * (ranks - 1)
        sizes = [draw.choice([1, 1, 1, 6]) if kind != "links" else 0 for _ in range(layers)]
        memory = bytes_of(sizes, tuple(draw.choice([5, 14, 30]) for _ in range(ranks)))
        sums = [sum(weights[:i]) for i in range(layers + 1)]
        best = [0.0] + [math.inf] * layers
        for s in range(ranks):
            send = [0, *sent] if s < ranks - 1 else [0] * (layers + 1)
            best = [
                min(
                    (
                        max(best[a], sums[e] - sums[a] + send[e])
                        for a in range(e)
                        if memory.fits(s, a, e)
                    ),
                    default=math.inf,
                )
                for e in range(layers + 1)
            ]
        try:
            partition = exact(weights, ranks, memory=memory, links=links, output_bytes=sent)
        except PartitionError:
            assert best[-1] == math.inf
            continue
        feasible += 1
        last = [sent[end - 1] for end in partition.bounds[1:-1]] + [0]
        assert max(map(sum, zip(stage_loads(weights, partition), last, strict=True))) == best[-1]
        assert all(memory.fits(s, a, e) for s, (a, e) in enumerate(pairwise(partition.bounds)))
    assert feasible >= 3


def test_half_blocks_have_the_recorded_gains_on_fixed_traces():
    """Whole blocks, half blocks and equal shares over two blocks per rank, on 24 ranks."""
    expected = {
        "early_exit": (1.00, 1.24, 1.39),
        "freezing": (1.09, 1.19, 1.36),
        "pruning": (1.06, 1.10, 1.17),
    }
    folder = Path(__file__).parents[2] / "benchmarks" / "data" / "traces"
    for case, gains in expected.items():
        data = json.loads((folder / f"{case}-48-2048.json").read_text())
        sums = [0.0] * 4
        for row in zip(data["f"], data["b"], data["w"], strict=True):
            halves = [math.fsum(x) for x in zip(*row, strict=True)]
            blocks = [a + b for a, b in zip(halves[::2], halves[1::2], strict=True)]
            placed = [(uniform(48, 24), blocks)]
            placed += [(exact(weights, 24), weights) for weights in (blocks, halves)]
            found = [max(stage_loads(weights, x)) for x, weights in placed]
            sums = list(map(sum, zip(sums, [*found, math.fsum(halves) / 24], strict=True)))
        assert tuple(round(sums[0] / x, 2) for x in sums[1:]) == gains


def bytes_of(sizes: list[int], limits: tuple[int, ...]) -> MemoryLimits:
    return MemoryLimits(
        tuple(LayerCost(1, 1, 1, weight_bytes=x) for x in sizes), ((),) * len(limits), limits
    )


def test_bottleneck_is_exact_to_the_last_bit():
    # A relative difference of 2e-16 decides. A bisection to a tolerance would not see it.
    weights = [1.0, 1.0 + 2**-52, 1.0, 1.0 - 2**-53]
    assert exact(weights, 2).counts == (2, 2)
    assert exact(weights[::-1], 2).counts == (2, 2)
    assert exact([1.0, 1e-16, 1.0 + 2**-52, 0.0], 2).counts == (2, 2)
    # Loads of hours and of nanoseconds alike.
    for unit in (1e9, 1e-9):
        assert exact([3 * unit, unit, unit, unit], 2).counts == (1, 3)


@many
@given(st.data(), st.integers(1, 9))
def test_moves_transform_the_old_placement_into_the_new(data: st.DataObject, layers: int):
    old, new = data.draw(placements(layers)), data.draw(placements(layers))
    owners = [old.owner(layer) for layer in range(layers)]
    for layer, source, target in moves(old, new):
        assert owners[layer] == source != target
        owners[layer] = target
    assert owners == [new.owner(layer) for layer in range(layers)]
    assert moves(old, old) == ()


def test_moves_are_in_layer_order():
    found = moves(Partition((3, 1)), Partition((1, 2, 1)))
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
    with pytest.raises(PartitionError, match="time, parameters"):
        weigh(layers, "flops")


def test_loads_and_imbalance():
    assert stage_loads([4.0, 3.0, 2.0, 2.0, 1.0], Partition((2, 3))) == (7.0, 5.0)
    assert stage_loads([0.1] * 10, Partition((10,))) == (1.0,)
    assert imbalance([7.0, 5.0]) == pytest.approx(2 / 6)
    assert imbalance([3.0, 3.0]) == 0.0
    assert imbalance([0.0, 0.0]) == 0.0
    with pytest.raises(PartitionError):
        imbalance([])


@pytest.mark.parametrize("make", [uniform, lambda layers, ranks: exact([1.0] * layers, ranks)])
def test_more_ranks_than_layers_are_refused(make: Callable[[int, int], Partition]):
    with pytest.raises(PartitionError, match=r"5 ranks .* 4"):
        make(4, 5)
    with pytest.raises(PartitionError, match="0 ranks"):
        make(4, 0)


def test_insufficient_memory_is_explained():
    for sizes, limits, message in (
        ([1, 9, 1], (4, 5), r"layer 1 .* stage 1 .* 9 bytes, the limit there is 5"),
        (
            [3] * 6,
            (7, 7, 5),
            r"stage 2 cannot hold layers 4\.\.5 .*: 6 bytes needed, the limit is 5",
        ),
        ([3] * 3, (5, 2, 5), r"stage 1 cannot hold layer 1 .*: 3 bytes needed, the limit is 2"),
    ):
        with pytest.raises(PartitionError, match=message):
            exact([1.0] * len(sizes), len(limits), memory=bytes_of(sizes, limits))


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_invalid_layer_weight_is_refused(weight: float):
    with pytest.raises(PartitionError, match="layer 1 has the weight"):
        exact([1.0, weight], 1)


def test_bad_partitions_are_refused():
    for counts in ((), (2, 0, 1), (3, -1)):
        with pytest.raises(PartitionError):
            Partition(counts)
    two = Partition((1, 1))
    with pytest.raises(PartitionError, match="stage 2"):
        two.range_of(2)
    with pytest.raises(PartitionError, match="layer -1"):
        two.owner(-1)
    with pytest.raises(PartitionError, match="same model"):
        moves(two, Partition((3,)))
    with pytest.raises(PartitionError, match="same model"):
        exact([1.0, 1.0], 2, current=Partition((3,)))
    with pytest.raises(PartitionError, match="2 stages, but 1 ranks"):
        exact([1.0, 1.0], 1, memory=bytes_of([1, 1], (9, 9)))
