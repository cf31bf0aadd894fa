"""Placement algorithms of other systems, as published, with their known defects."""

from itertools import pairwise

import pytest

from dynmo.balance.baselines import (
    deepspeed_balanced,
    deepspeed_probe,
    deepspeed_type,
    deepspeed_uniform,
    in_order,
    megatron_uniform,
    placement,
)
from dynmo.balance.diffusion import Transfers, published_diffusion
from dynmo.balance.partition import Partition, exact, stage_loads
from dynmo.errors import PartitionError

NAMES = (
    "embedding",
    *(f"blocks.{i}.{half}" for i in range(8) for half in ("attention", "feed_forward")),
    "head",
)


def test_deepspeed_uniform_has_the_published_counts():
    assert deepspeed_uniform(10, 4) == [0, 3, 6, 8, 10]
    assert deepspeed_uniform(8, 4) == [0, 2, 4, 6, 8]
    # Older versions gave the remainder to the last stage: 7 layers there, 2 elsewhere.
    assert deepspeed_uniform(47, 20, rest_last=True)[-3:] == [36, 38, 47]


def test_deepspeed_is_optimal_if_its_tolerance_is_small():
    for weights, parts in (
        ([3, 1, 4, 1, 5, 9, 2, 6], 3),
        ([10.0] * 12, 4),
        ([100, 300, 200, 400, 100, 100], 2),
    ):
        partition = placement(deepspeed_balanced(weights, parts), "DeepSpeed's")
        assert max(stage_loads(weights, partition)) == max(
            stage_loads(weights, exact(weights, parts))
        )


def test_deepspeed_in_seconds_stops_too_early():
    # The same layers in milliseconds and in seconds: only the number of the tolerance, 1e-3, is the
    # same.
    milliseconds = [2.1, 1.2, 1.3, 2.7, 2.7, 2.7, 1.9, 2.5, 1.7, 2.0]
    seconds = [x / 1000 for x in milliseconds]
    best = max(stage_loads(milliseconds, exact(milliseconds, 4)))

    def excess(weights: list[float], unit: float) -> float:
        partition = placement(deepspeed_balanced(weights, 4), "DeepSpeed's")
        return max(stage_loads(weights, partition)) / unit / best - 1

    assert excess(milliseconds, 1.0) < 0.001
    assert excess(seconds, 1e-3) > 0.08
    assert max(stage_loads(seconds, exact(seconds, 4))) == pytest.approx(best / 1000)


def test_deepspeed_leaves_stages_empty():
    # A first layer as heavy as the bottleneck does not get under it, so the first stage stays
    # empty.
    bounds = deepspeed_balanced([5, 1, 1, 1, 1], 3)
    assert any(start == stop for start, stop in pairwise(bounds))
    assert exact([5, 1, 1, 1, 1], 3).counts == (1, 2, 2)
    with pytest.raises(PartitionError, match="leaves stage 0 without a layer"):
        placement(bounds, "DeepSpeed's placement")
    assert deepspeed_balanced([1.0] * 3, 5) == [0, 1, 2, 3, 3, 3]


def test_deepspeed_refuses_an_exact_fit():
    # Two stages of 2 have the bottleneck 2, but the probe wants less than that.
    assert not deepspeed_probe([1, 2, 3, 4], 2, 2.0)[1]
    assert deepspeed_probe([1, 2, 3, 4], 2, 2.001) == ([0, 2, 4], True)


def test_deepspeed_with_fewer_layers_than_stages_is_refused():
    with pytest.raises(PartitionError, match="never ends for 3 layers on 5 stages"):
        deepspeed_probe([1.0, 2.0, 3.0], 5, 1.0)


def test_deepspeed_ends_with_a_tolerance_below_rounding():
    assert deepspeed_balanced([1e20, 3e20, 2e20, 1e20], 2) == [0, 2, 4]


def test_deepspeed_places_layers_by_type():
    assert deepspeed_type(NAMES, "attention", 4) == [0, 5, 9, 13, 18]
    with pytest.raises(PartitionError, match="type:conv is found in no layer's name"):
        deepspeed_type(NAMES, "conv", 4)
    with pytest.raises(PartitionError, match="not a regular expression"):
        deepspeed_type(NAMES, "(", 4)


def test_megatron_places_blocks_evenly():
    assert megatron_uniform(NAMES, 4).counts == (5, 4, 4, 5)
    assert megatron_uniform(NAMES, 5, embedding=True, loss=True).counts == (3, 4, 4, 4, 3)
    assert megatron_uniform(NAMES, 3, embedding=True).counts == (5, 6, 7)
    # Counted as a block, the embedding can be all that its stage has.
    assert megatron_uniform(NAMES, 10, embedding=True, loss=True).counts == (1, *(2,) * 8, 1)
    with pytest.raises(PartitionError, match="3 stages, not 8 blocks"):
        megatron_uniform(NAMES, 3)
    with pytest.raises(PartitionError, match="8 blocks and the embedding"):
        megatron_uniform(NAMES, 4, embedding=True)
    with pytest.raises(PartitionError, match="stage 0 without a layer"):
        megatron_uniform(NAMES[1:], 10, embedding=True, loss=True)


def test_algorithm_3_rarely_keeps_the_layer_order():
    # The lightest layer of rank 0 happens to be its last, and rank 1 the least loaded.
    lucky = published_diffusion([3.0, 3.0, 1.0, 2.0], Partition((3, 1)))
    assert lucky.ranks == ((0, 1), (3, 2))
    assert in_order(lucky).counts == (2, 2)
    with pytest.raises(PartitionError, match="rank 0 with the layers"):
        in_order(published_diffusion([4.0, 3.0, 2.0, 2.0, 1.0, 1.0, 2.0], Partition((3, 2, 2))))
    with pytest.raises(PartitionError, match="rank 1"):
        in_order(Transfers(((0, 1), ()), ()))
