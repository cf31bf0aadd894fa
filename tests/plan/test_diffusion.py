"""Path diffusion descends and keeps the order."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynmo.cost.layer_cost import LinkCost
from dynmo.errors import PartitionError
from dynmo.plan.bisection import exact
from dynmo.plan.diffusion import diffuse
from dynmo.plan.partition import Partition, stage_loads, uniform

many = settings(derandomize=True)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[float], Partition]:
    # Multiples of 1/8, so that loads are exact floats and may be compared.
    weights = [x / 8 for x in draw(st.lists(st.integers(0, 40), min_size=1, max_size=14))]
    cuts = draw(st.sets(st.integers(1, len(weights) - 1))) if len(weights) > 1 else set[int]()
    return weights, Partition.from_bounds([0, *sorted(cuts), len(weights)])


def descending(weights: list[float], partition: Partition) -> list[float]:
    return sorted(stage_loads(weights, partition), reverse=True)


@many
@given(cases())
def test_diffusion_descends_until_no_path_helps(case: tuple[list[float], Partition]):
    weights, current = case
    result = diffuse(weights, current)
    assert result == diffuse(weights, current)
    if result.rounds:
        assert descending(weights, result.partition) < descending(weights, current)
    else:
        assert result.partition == current
        assert result.moves == ()
    repeated = diffuse(weights, result.partition)
    assert (repeated.partition, repeated.rounds) == (result.partition, 0)


@many
@given(cases())
def test_only_boundary_layers_cross_to_a_neighbour(case: tuple[list[float], Partition]):
    weights, current = case
    result = diffuse(weights, current)
    owners = [current.owner(layer) for layer in range(current.layers)]
    for layer, source, target in result.moves:
        assert owners[layer] == source
        assert abs(source - target) == 1
        owners[layer] = target
    assert owners == [result.partition.owner(layer) for layer in range(current.layers)]
    assert len(result.moves) <= result.rounds * (current.stages - 1)


@many
@given(cases(), st.integers(1, 5))
def test_no_stage_exceeds_its_memory_limit(case: tuple[list[float], Partition], limit: int):
    weights, current = case
    result = diffuse(weights, current, fits=lambda stage, start, stop: stop - start <= limit)
    for old, new in zip(current.counts, result.partition.counts, strict=True):
        assert new <= max(limit, old)


def test_path_to_a_distant_stage_evens_a_slope():
    # 4 3 2 layers: one layer to the next stage only exchanges the two loads; the path to the last
    # stage evens all three.
    assert diffuse([1.0] * 9, Partition((4, 3, 2))).partition.counts == (3, 3, 3)
    slope = diffuse([1.0] * 55, Partition((10, 9, 8, 7, 6, 5, 4, 3, 2, 1))).partition
    assert sorted(slope.counts) == [5] * 5 + [6] * 5


def test_moves_match_a_hand_computed_example():
    # The loads are 9 3 3. Both flows run downstream, and a layer over each boundary lessens them.
    # The loads become 7 4 4. Then no path lowers the largest.
    result = diffuse([4.0, 3.0, 2.0, 2.0, 1.0, 1.0, 2.0], Partition((3, 2, 2)))
    assert result.moves[:2] == ((2, 0, 1), (4, 1, 2))
    assert max(stage_loads([4.0, 3.0, 2.0, 2.0, 1.0, 1.0, 2.0], result.partition)) <= 7.0


def test_one_round_moves_a_layer_over_every_uneven_boundary():
    result = diffuse([1.0] * 10, Partition((4, 1, 1, 4)))
    assert result.partition.counts == (3, 2, 2, 3)
    assert result.moves == ((3, 0, 1), (6, 3, 2))
    assert result.rounds == 1


def test_result_is_within_one_layer_of_the_optimum():
    draw = random.Random(7)
    near, total = 0, 100
    for _ in range(total):
        layers = draw.randint(2, 40)
        ranks = draw.randint(1, min(layers, 12))
        kind = [lambda: draw.lognormvariate(0, 1), draw.random]
        weights = [draw.choice(kind)() for _ in range(layers)]
        cuts = sorted(draw.sample(range(1, layers), ranks - 1))
        given = Partition.from_bounds([0, *cuts, layers])
        current = draw.choice([uniform(layers, ranks), given])
        largest = max(stage_loads(weights, diffuse(weights, current).partition))
        near += largest <= max(stage_loads(weights, exact(weights, ranks))) + max(weights)
    assert near >= 0.99 * total


def test_placement_of_another_model_is_refused():
    with pytest.raises(PartitionError, match="3 weights for a placement of 2 layers"):
        diffuse([1.0] * 3, Partition((1, 1)))


@many
@given(cases(), st.data())
def test_sending_counts_as_load(case: tuple[list[float], Partition], data: st.DataObject):
    weights, current = case
    eighths = st.integers(0, 80).map(lambda x: x / 8)
    seconds = [data.draw(eighths) for _ in range(current.stages - 1)]
    links, sizes = [LinkCost(x, math.inf) for x in seconds], [1] * current.layers

    def times(partition: Partition) -> list[float]:
        loads = stage_loads(weights, partition)
        return sorted(map(sum, zip(loads, [*seconds, 0.0], strict=True)), reverse=True)

    result = diffuse(weights, current, links=links, output_bytes=sizes)
    descent = list(map(times, result.placements))
    if any(weights):
        assert descent == sorted(descent, reverse=True)
        assert len(set(map(tuple, descent))) == len(descent)
    repeated = diffuse(weights, result.partition, links=links, output_bytes=sizes)
    assert repeated.rounds == 0
