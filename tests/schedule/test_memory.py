"""Memory limits of stages, compared with hand computations."""

from dynmo.cost.layer_cost import LayerCost
from dynmo.schedule.memory import MemoryLimits

LAYERS = (
    LayerCost(1, 1, 1, 0, 10, 10, 20, activation_bytes=7, stash_bytes=3),
    LayerCost(1, 1, 1, weight_bytes=1, activation_bytes=5, stash_bytes=5),
    LayerCost(1, 1, 1, optimizer_bytes=2, activation_bytes=11, stash_bytes=1),
)


def test_limits_of_a_hand_computed_example():
    limits = MemoryLimits(LAYERS, (((2, 1), (1, 3)), ((1, 1),)), (77, 13))
    # stage 0: static 40 + 1. Its pairs give 2 * 12 + 1 * 8 = 32 and 1 * 12 + 3 * 8 = 36.
    # stage 1: static 2. Its pair gives 1 * 11 + 1 * 1.
    assert (limits.need(0, 0, 2), limits.need(1, 2, 3)) == (41 + 36, 2 + 12)
    assert MemoryLimits(LAYERS, (((0, 0),),), (99,)).need(0, 0, 2) == 41, "no microbatch"
    assert limits.fits(0, 0, 2)
    assert not limits.fits(1, 2, 3)
