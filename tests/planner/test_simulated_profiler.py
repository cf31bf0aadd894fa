from __future__ import annotations

from dynmo.cost.layer_cost import LayerCost
from dynmo.planner.workload import SimulatedProfiler


def costs(*seconds: float) -> tuple[LayerCost, ...]:
    return tuple(LayerCost(x, 2 * x, 3 * x, 7) for x in seconds)


def test_costs_are_medians_over_the_newest_steps() -> None:
    profiler = SimulatedProfiler(2, readings_per_step=1)
    for seconds in (9.0, 1.0, 2.0, 3.0, 4.0, 5.0):
        profiler.observe(costs(seconds, 1.0))
    assert profiler.costs() == costs(3.0, 1.0)
    assert profiler.halves() == (costs(1.5, 1.0), costs(4.5, 1.0))


def test_one_reading_has_no_halves_and_two_of_a_step_agree() -> None:
    for readings, halves in ((1, ()), (2, (costs(4.0), costs(4.0)))):
        profiler = SimulatedProfiler(1, readings)
        profiler.observe(costs(4.0))
        assert profiler.halves() == halves


def test_changed_layer_is_measured_from_scratch() -> None:
    profiler = SimulatedProfiler(2)
    for _ in range(5):
        profiler.observe(costs(1.0, 1.0))
    profiler.forget([1])
    profiler.observe(costs(8.0, 8.0))
    assert profiler.costs() == costs(1.0, 8.0)
