"""A workload's file: valid contents, and errors that name the key."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dynmo.cost.layer_cost import LayerCost, LinkCost
from dynmo.errors import InputError
from dynmo.plan.replay import StepTime, replay
from dynmo.plan.workload import Policy, parse, read
from dynmo.schedule.bounds import Objective

EXAMPLE = Path(__file__).parents[2] / "examples/workload.toml"
MOMENT = {"step": 0, "f": [1.0, 1.0], "b": [1.0, 1.0], "w": [1.0, 1.0]}
LEAST: dict[str, Any] = {"steps": 4, "ranks": 2, "microbatches": 2, "layers": {"moments": [MOMENT]}}


def total(steps: Sequence[StepTime]) -> float:
    return sum(x.seconds for x in steps)


def test_minimal_workload_file() -> None:
    workload = parse(LEAST, Path())
    assert workload.moments == ((0, (LayerCost(1, 1, 1),) * 2),)
    assert (workload.schedule, workload.objective) == ("zb-h1", Objective.MAKESPAN)
    assert (workload.policy, workload.replicas) == (Policy(), 1)
    assert workload.link.to_link_cost() == LinkCost(0.0, math.inf)
    assert replay(workload).moves == ()


def test_general_workspace_is_the_default_of_each_op() -> None:
    given = layers(workspace_bytes=[7, 8], forward_workspace_bytes=0)
    for cost, size in zip(parse(LEAST | given, Path()).moments[0][1], (7, 8), strict=True):
        assert cost.workspace_bytes == cost.weight_workspace_bytes == size
        assert cost.forward_workspace_bytes == 0


def test_example_workload_file() -> None:
    workload = read(EXAMPLE)
    assert (workload.name, len(workload.names), workload.steps) == ("freezing", 48, 480)
    assert (workload.ranks, workload.replicas) == (8, 2)
    assert [step for step, _ in workload.moments] == list(range(0, 480, 20))
    trace = json.loads((EXAMPLE.parent / "workload-freezing.json").read_text())
    assert [x.f for x in workload.moments[3][1]] == pytest.approx(
        [0.004 * f for f in trace["f"][3]]
    )
    assert workload.moments[0][1][0].weight_bytes == 12_582_912
    outcome = replay(workload.model_copy(update={"microbatches": 16}))
    static, perfect = total(outcome.static), total(outcome.perfect)
    assert 1.15 < static / outcome.seconds < static / perfect < 6


def test_moments_after_the_last_step_are_dropped(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(
        json.dumps({"f": [[1], [2], [3]], "b": [[1]] * 3, "w": [[1]] * 3, "case": "x"})
    )
    given = {"ranks": 1, "steps": 2, "layers": {"trace": "t.json", "unit": 0.5}}
    workload = parse(LEAST | given, tmp_path)
    assert [(step, x[0].f) for step, x in workload.moments] == [(0, 0.5), (1, 1.5)]


def layers(**changes: Any) -> dict[str, Any]:
    return {"layers": {"moments": [MOMENT], **changes}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stepz": 3}, "unknown key 'stepz'; did you mean 'steps'?"),
        ({"steps": None}, "steps = None: must be a valid integer"),
        ({"ranks": 0}, "ranks = 0"),
        ({"policy": {"evry": 3}}, "unknown key 'policy.evry'; did you mean 'every'?"),
        ({"policy": {"cost": "money"}}, 'policy.cost = "money"'),
        ({"memory_limit": "much"}, 'memory_limit = "much": not a size'),
        ({"memory_limit": ["1GiB", "much"]}, 'memory_limit = ["1GiB", "much"]: not a size'),
        ({"memory_limit": [1]}, "memory_limit has 1 entries for 2 ranks"),
        ({"speeds": [1.0]}, "speeds has 1 entries for 2 ranks"),
        ({"speeds": [1.0, 0.0]}, "speeds[1] = 0.0: must be greater than 0"),
        ({"speeds": [1.0, -1.0]}, "speeds[1] = -1.0"),
        (layers(weight_bytes=[1]), "layers.weight_bytes has 1 entries"),
        (layers(weight_bytes=[1, -1]), "layers.weight_bytes[1] = -1"),
        (layers(names=["a"]), "layers.names has 1 entries"),
        (layers(trace="t.json"), "[layers] needs either trace"),
        ({"layers": {}}, "[layers] needs either trace"),
        ({"layers": {"trace": "none.json"}}, "none.json"),
        ({"layers": {"trace": 3}}, "layers.trace = 3"),
        ({"layers": [1]}, "layers = [1]: must be a section of keys"),
        ({"link": {"latencyy": 1}}, "unknown key 'link.latencyy'; did you mean 'latency'?"),
        (layers(moments=[MOMENT | {"g": [1.0]}]), "unknown key 'layers.moments.g'"),
        ({"policy": {"balancer": "best"}}, 'policy.balancer = "best"'),
        (layers(moments=[]), "[layers] needs either trace"),
        (layers(moments=[MOMENT | {"step": 1}]), "layers.moments begin at the steps [1]"),
        (layers(moments=[MOMENT, MOMENT]), "layers.moments begin at the steps [0, 0]"),
        (layers(moments=[MOMENT, MOMENT | {"step": 4}]), "the last begins at step 4"),
        (layers(moments=[MOMENT | {"b": [1.0]}]), "layers.moments[0].b has 1 entries"),
        (
            layers(moments=[MOMENT | {"b": [1.0, math.nan]}]),
            "layers.moments[0].b[1] = nan",
        ),
        (layers(moments=[{"step": 0, "f": [1.0]}]), "layers.moments[0].b: missing"),
        (layers(moments=[MOMENT | {"b": [0.0, 0.0], "w": [0.0, 0.0]}]), "b and w are 0"),
    ],
)
def test_a_wrong_value_is_refused_by_key(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError) as error:
        parse(LEAST | change, tmp_path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        ("{", "not JSON: "),
        ('{"f": [[1]], "b": [[1]]}', "t.json: w: missing"),
        (
            '{"f": [[1]], "b": [[1]], "w": [[NaN]]}',
            "t.json: w[0][0] = nan",
        ),
        ('{"f": [[1]], "b": [[1]], "w": [1]}', "t.json: w[0] = 1: must be a list"),
        ('{"f": [[1]], "b": [[1]], "w": []}', "f, b and w have [1, 1, 0] moments"),
        (
            '{"f": [[1, 1], [1]], "b": [[1, 1], [1, 1]], "w": [[1, 1], [1, 1]]}',
            "t.json: moments[1].f has 1 entries for 2 layers",
        ),
    ],
)
def test_a_wrong_trace_is_refused_by_place(trace: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(trace)
    with pytest.raises(InputError, match=re.escape(message)):
        parse(LEAST | {"layers": {"trace": "t.json"}}, tmp_path)


def test_speeds_and_memory_limits_of_ranks() -> None:
    """The slow rank gets fewer layers."""
    moment = {key: [1.0] * 9 for key in "fbw"} | {"step": 0}
    given = {"layers": {"moments": [moment], "weight_bytes": 100}, "steps": 30, "ranks": 3}
    workload = parse(LEAST | given | {"speeds": [1, 1, 0.25]}, Path())
    assert workload.speeds == (1, 1, 0.25)
    outcome = replay(workload)
    assert outcome.partitions[-1] == (4, 4, 1)
    assert total(outcome.perfect) < outcome.seconds < total(outcome.static)
    limited = parse(LEAST | given | {"memory_limit": ["1KiB", 200, "1 KB"]}, Path())
    assert limited.memory_limit == (1024, 200, 1000)


def test_initial_placement_of_another_size_is_refused() -> None:
    with pytest.raises(InputError, match=r"policy\.initial counts 2 layers on 1 stages"):
        replay(parse(LEAST | {"policy": {"initial": [2]}}, Path()))
