"""The end-to-end benchmark of the dynamic cases.

The tests check the evaluation of measurements, and the configs of the sides.
"""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.cases import best_static, share, simulated, summarize
from benchmarks.cases_race import (
    CASES,
    MICROBATCHES,
    SCHEDULE,
    model_for,
    phases,
    placed_by_parameters,
    published_case,
    section_of,
    settings,
    sides,
)
from benchmarks.cost_traces import timeline
from benchmarks.published import PUBLISHED
from dynmo.config import parse
from dynmo.cost.layer_cost import LayerCost
from dynmo.plan.partition import Partition

SMALL = {"blocks": 4, "hidden": 16, "heads": 2, "sequence": 32}


def test_phases_lie_between_changes() -> None:
    assert phases([], 5) == [(0, 5)]
    assert phases([0], 5) == [(0, 5)]
    assert phases([2, 4], 5) == [(0, 2), (2, 4), (4, 5)]


def test_share_is_undefined_without_an_ideal_gain() -> None:
    assert share(1.4, 1.5) == pytest.approx(0.8)
    assert share(1.0, 1.029) is None


def trained(frozen: int) -> tuple[LayerCost, ...]:
    """Six layers of 1 s each way, of which so many are frozen."""
    return (LayerCost(1.0, 0.0, 0.0),) * frozen + (LayerCost(1.0, 1.0, 1.0),) * (6 - frozen)


def test_ideal_is_computed_for_each_phase() -> None:
    """With three frozen layers, loads of 3 and 9 s per microbatch become 6 and 6 s.

    The placement of 4 + 2 layers does this.
    """
    spans, costs = [(0, 2), (2, 6)], [trained(0), trained(3)]
    seconds_of = simulated(spans, costs, [[3, 3]] * 4 + [[4, 2]] * 2)

    def seconds(layers: tuple[LayerCost, ...], *counts: int) -> float:
        return timeline(layers, Partition(counts), MICROBATCHES, SCHEDULE).makespan

    first, even, uneven = seconds(costs[0], 3, 3), seconds(costs[1], 3, 3), seconds(costs[1], 4, 2)
    assert seconds_of["uniform"] == pytest.approx([2 * first, 4 * even])
    assert seconds_of["best"] == pytest.approx([2 * first, 4 * uneven])
    assert seconds_of["as_placed"][1] == pytest.approx(2 * even + 2 * uneven)
    assert even / uneven > 1.3


def side(seconds: list[float], layers: list[list[int]], digest: str = "a") -> dict[str, Any]:
    costs = [[[x.f, x.b, x.w] for x in trained(frozen)] for frozen in (0, 3)]
    overhead = {"measure": 0.01, "decide": 0.02, "move": 0.03}
    told = {"changes": [2], "what": ["froze"], "costs": costs, "layers": layers}
    told |= {"idle": [0.3] * 6, "moves": [], "tokens": [], "overhead": overhead}
    # 6 layers of 1 s forward, of which 3 take 2 s more: for each microbatch.
    ops = [1.1 * MICROBATCHES * 12.0] * 6
    measured = {"seconds": seconds, "program": [0.9 * x for x in seconds], "ops": ops}
    return measured | told | {"digest": digest, "loss": 1.0}


def test_a_row_compares_every_side_with_dynmo() -> None:
    even = [[3, 3]] * 6
    uniform = side([2.0] * 6, even)
    ours = side([2.0, 2.0, 2.0, 2.0, 1.0, 1.0], even[:4] + [[4, 2]] * 2)
    dense = side([3.0] * 6, even, "b")
    row = summarize("freezing", [{"uniform": uniform, "dense": dense, "dynmo": ours}])
    assert row["phases"] == [[0, 2], [2, 6]]
    over = row["speedup_over"]
    assert over["uniform"] == pytest.approx({"run": 1.2, "last_phase": 2.0})
    assert over["dense"] == pytest.approx({"run": 1.8, "last_phase": 3.0})
    assert row["ideal"]["run"] > row["ideal_as_placed"] > 1
    assert row["share_of_ideal"]["run"] == pytest.approx(0.2 / (row["ideal"]["run"] - 1))
    assert [phase["steps"] for phase in row["by_phase"]] == row["phases"]
    assert [phase["speedup"] for phase in row["by_phase"]] == pytest.approx([1.0, 8 / 6])
    assert row["by_phase"][-1]["ideal"] > row["by_phase"][-1]["ideal_as_placed"]
    assert row["overhead"]["share_of_run"] == pytest.approx(0.06 / 10)
    assert row["same_work_takes"] == 1.0
    assert row["ops_over_costs"] == pytest.approx({"uniform": 1.1, "dynmo": 1.1})
    assert row["simulated_idle_ratio"]["dynmo"] < row["simulated_idle_ratio"]["uniform"]
    assert 0 <= row["simulated_bubble_ratio"]["dynmo"] <= row["simulated_idle_ratio"]["dynmo"]
    assert row["program_share"] == pytest.approx({"uniform": 0.9, "dynmo": 0.9})
    measured = {name: 0.9 * x for name, x in row["measured_over_simulated"].items()}
    assert row["program_over_simulated"] == pytest.approx(measured)
    twice = [[[2 * x for x in layer] for layer in phase] for phase in ours["costs"]]
    slower, broken = (
        summarize("freezing", [{"uniform": uniform, "dynmo": ours | change}])
        for change in ({"costs": twice}, {"digest": "c"})
    )
    assert slower["same_work_takes"] == 2.0
    assert row["same_weights"], "the dense run's need not be the same"
    assert not broken["same_weights"]


def test_best_static_side_has_the_least_speedup() -> None:
    speedups = {"dense": 1.1, "uniform": 1.3, "parameters": 1.2}
    assert best_static({"speedup_over": {x: {"run": y} for x, y in speedups.items()}}) == (
        "parameters"
    )


def test_every_case_has_a_published_figure() -> None:
    assert {published_case(case) for case in CASES} == set(PUBLISHED)


@pytest.mark.parametrize("case", CASES)
def test_the_dense_side_is_the_same_model(case: str) -> None:
    """Only mixture of depths adds parameters, those of its routers."""
    configs = sides(case, 20, SMALL)
    uniform, dense = (model_for(case, parse(configs[name])) for name in ("uniform", "dense"))
    assert dense.layers == uniform.layers
    if section_of(case) in ("sparse_attention", "early_exit"):
        assert getattr(parse(configs["dense"]).dynamism, case).start == 19


@pytest.mark.parametrize("case", CASES)
def test_every_side_is_a_valid_run(case: str) -> None:
    steps = 20
    configs = sides(case, steps)
    assert ("mask" in configs) == (case == "pruning")
    for given in configs.values():
        config = parse(given)
        assert config.ranks == 2
    model = model_for(case, parse(settings(case, steps)))
    assert placed_by_parameters(model).layers == model.layers
