"""Memory limits of stages, compared with hand computations."""

import pytest

from dynmo.cost.layer_cost import LayerCost
from dynmo.errors import PartitionError
from dynmo.schedule.memory import MemoryLimits

LAYERS = (
    LayerCost(1, 1, 1, 0, 10, 10, 20, activation_bytes=7, stash_bytes=3),
    LayerCost(1, 1, 1, weight_bytes=1, activation_bytes=5, stash_bytes=5),
    LayerCost(1, 1, 1, optimizer_bytes=2, activation_bytes=11, stash_bytes=1),
)


NEGATIVE = LayerCost(1, 1, 1, activation_bytes=-1)


def test_limits_of_a_hand_computed_example():
    limits = MemoryLimits(LAYERS, (((2, 1), (1, 3)), ((1, 1),)), (77, 13))
    # stage 0: static 40 + 1. Its pairs give 2 * 12 + 1 * 8 = 32 and 1 * 12 + 3 * 8 = 36.
    # stage 1: static 2. Its pair gives 1 * 11 + 1 * 1.
    assert (limits.need(0, 0, 2), limits.need(1, 2, 3)) == (41 + 36, 2 + 12)
    assert MemoryLimits(LAYERS, ((),), (99,)).need(0, 0, 2) == 41, "no microbatch"
    assert limits.fits(0, 0, 2)
    assert not limits.fits(1, 2, 3)
    for stage in range(2):
        for start in range(3):
            fitting = [stop for stop in range(start + 1, 4) if limits.fits(stage, start, stop)]
            assert limits.reach(stage, start) == max(fitting, default=start)


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (MemoryLimits, (LAYERS, ((), ()), (1,)), "1 memory limits for 2 stages"),
        (MemoryLimits, ((NEGATIVE,), ((),), (1,)), "layer 0 has a negative"),
    ],
)
def test_arguments_of_unequal_length_are_refused(function, arguments, message):
    with pytest.raises(PartitionError, match=message):
        function(*arguments)
