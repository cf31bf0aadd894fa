"""`schedule = "auto"`: a run that changes the stages of its ranks keeps its bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import dynmo
from dynmo.config import parse
from dynmo.errors import ConfigError, InputError
from dynmo.pipeline.assembly import first_partition
from dynmo.pipeline.options import grouped
from dynmo.train.setup import plan_run
from tests.pool import Pool

JOB = "tests.pipeline.jobs:changing_shape"
# Nine layers, each step under another schedule than the last.
ON_TWO: list[list[Any]] = [
    ["zb-auto", [4, 5]],
    ["v-auto", [1, 3, 2, 3]],
    ["interleaved-1f1b", [2, 2, 4, 1]],
    ["v-auto", [5, 1, 1, 2]],
    ["zb-auto", [7, 2]],
]
ON_FOUR: list[list[Any]] = [
    ["zb-auto", [3, 2, 2, 2]],
    ["v-auto", [1, 1, 1, 1, 2, 1, 1, 1]],
    ["zb-auto", [1, 1, 3, 4]],
    ["interleaved-1f1b", [1, 1, 1, 1, 1, 1, 2, 1]],
    ["v-auto", [2, 1, 1, 1, 1, 1, 1, 1]],
]


@pytest.mark.parametrize(
    ("ranks", "shapes", "options"),
    [
        (2, ON_TWO, {"refuses": True}),
        (4, ON_FOUR, {"refuses": True, "post_validation": True}),
        (4, ON_TWO, {"replicas": 2}),
    ],
)
def test_changes_of_shape_keep_the_bits(
    pool: Pool, tmp_path: Path, ranks: int, shapes: list[list[Any]], options: dict[str, Any]
) -> None:
    """The last checkpoint, written under the last schedule, goes on under it."""
    (alone,) = pool.run(JOB, 1, shapes=shapes, folder=str(tmp_path / "alone"))
    rows = pool.run(JOB, ranks, shapes=shapes, folder=str(tmp_path / "ranks"), **options)
    names = [name for name, _ in shapes]
    for row in rows:
        assert row["names"] == [*names, names[-1]], "a run that resumes keeps its schedule"
        assert tuple(row["stages"]) == tuple(shapes[-1][1])
        if options.get("refuses"):
            first, second = row["refused"]
            assert first == "no room"
            assert second.endswith("no room; all stay where they were")
        for key in ("losses", "norms", "evaluated", "weights"):
            assert row[key] == alone[key], key


def test_checkpoint_of_a_v_goes_on_under_one_stage_a_rank(pool: Pool, tmp_path: Path) -> None:
    """On one rank, auto has no V. On another number of ranks, the first schedule runs."""
    pool.run(JOB, 2, shapes=ON_TWO[:2], folder=str(tmp_path / "both"))
    rows = pool.run("tests.pipeline.jobs:resumed_otherwise", 2, folder=str(tmp_path / "both"))
    (alone,) = pool.run("tests.pipeline.jobs:resumed_otherwise", 1, folder=str(tmp_path / "both"))
    assert {row["name"] for row in [*rows, alone]} == {"zb-h1"}
    assert {row["weights"] for row in rows} == {alone["weights"]}


# Two ranks cannot share 9 + 6 + 6 + 3 ms evenly in order. A V can.
LIVE: dict[str, Any] = {
    "model": {"kind": "emulated", "layers": 4, "bytes": 4096}
    | {key: [0.009, 0.006, 0.006, 0.003] for key in "fbw"},
    "train": {"steps": 7, "global_batch": 4, "micro_batch": 1},
    "parallel": {"pipeline": 2, "timeout": 20.0},
    "pipeline": {"schedule": "auto"},
    "balance": {"balancer": "exact", "every": 4},
    "trace": {"steps": 0},
}
EVENTS = "tests.pipeline.exact_runs:events"


def test_a_run_changes_its_shape_when_that_pays(pool: Pool) -> None:
    events = pool.run(EVENTS, 2, config=LIVE)[0]
    (move,) = [e for e in events if e["event"] == "rebalance"]
    assert (move["step"], move["schedule"], move["to"]) == (4, "v-auto", [1, 1, 1, 1])
    steps = [e["layers"] for e in events if e["event"] == "step"]
    assert steps == [[2, 2]] * 4 + [[1, 1, 1, 1]] * 3
    named = {e["name"] for e in events if e["event"] == "schedule"}
    assert named <= {"zb-auto", "v-auto"}


def test_a_run_of_a_v_goes_back_when_that_pays(pool: Pool) -> None:
    """Here [1, 1, 1, 1] gives rank 0 two thirds of the work, and 1 + 3 layers a half."""
    times = {key: [0.009, 0.003, 0.003, 0.003] for key in "fbw"}
    config = LIVE | {
        "model": LIVE["model"] | times,
        "balance": LIVE["balance"] | {"initial": [1, 1, 1, 1]},
    }
    events = pool.run(EVENTS, 2, config=config)[0]
    moves = [(e["schedule"], e["to"]) for e in events if e["event"] == "rebalance"]
    assert moves == [("zb-auto", [1, 3])]
    alone = pool.run(EVENTS, 1, config=config | {"parallel": {}, "balance": {}})[0]
    assert events[-1]["event"] == "end"
    assert events[-1]["weights_digest"] == alone[-1]["weights_digest"]


def test_a_change_without_room_leaves_the_run_as_it_was(pool: Pool) -> None:
    events = pool.run(EVENTS, 2, config=LIVE, fits=False)[0]
    assert [e for e in events if e["event"] == "rebalance"] == []
    assert {tuple(e["layers"]) for e in events if e["event"] == "step"} == {(2, 2)}


# -- before anything is measured -------------------------------------------------------------------

GPT: dict[str, Any] = {
    "model": {"blocks": 3, "hidden": 8, "heads": 2, "sequence": 4},
    "train": {"micro_batch": 2, "global_batch": 16},
    "parallel": {"pipeline": 2},
    "pipeline": {"schedule": "auto"},
}


def test_dry_run_begins_with_one_stage_a_rank() -> None:
    plan = plan_run(parse(GPT))
    assert (plan.schedule, plan.partition, plan.stage_ranks) == ("zb-auto", (4, 4), (0, 1))
    assert list(plan.shapes) == ["zb-auto", "v-auto", "interleaved-1f1b"]
    assert plan.shapes["zb-auto"] == max(plan.memory)
    (line,) = plan.shape_lines()
    assert line.startswith("auto begins with zb-auto, v-auto needs 0.")
    assert json.loads(json.dumps(plan.to_json()))["shapes"] == dict(plan.shapes)
    fixed = plan_run(parse(GPT | {"pipeline": {"schedule": "v-auto"}}))
    assert "shapes" not in fixed.to_json()
    assert list(fixed.shape_lines()) == []
    assert max(fixed.memory) == plan.shapes["v-auto"]


def test_the_first_placement_may_say_the_shape() -> None:
    config = parse(GPT | {"balance": {"initial": [1, 3, 3, 1]}})
    plan = plan_run(config)
    assert (plan.schedule, plan.partition, plan.stage_ranks) == (
        "v-auto",
        (1, 3, 3, 1),
        (0, 1, 1, 0),
    )
    assert first_partition(config.options, 8).counts == (4, 4)


def test_memory_decides_the_first_shape() -> None:
    """A tight limit starts the schedule that needs least, and no limit is tighter than that."""
    shapes = plan_run(parse(GPT)).shapes
    least = min(shapes.values())
    plan = plan_run(parse(GPT | {"pipeline": {"schedule": "auto", "memory_limit": least}}))
    assert max(plan.memory) <= least
    with pytest.raises(InputError, match=r"pipeline\.memory_limit = 20000") as error:
        plan_run(parse(GPT | {"pipeline": {"schedule": "auto", "memory_limit": 20000}}))
    assert "needs" in str(error.value)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"parallel": {"pipeline": 9}}, "parallel.pipeline = 9 has 9 stages, more than"),
        ({"pipeline": {"schedule": "auto", "chunks": 2}}, "pipeline.chunks: auto chooses"),
        ({"balance": {"initial": [3, 3, 2]}}, "balance.initial has 3 entries"),
        ({"balance": {"initial": [3, 3, 3, 3]}}, "balance.initial sums to 12"),
        ({"parallel": {"pipeline": 2, "slices": True}}, "slices keep their stages"),
    ],
)
def test_options_that_auto_does_not_allow(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        plan_run(parse(GPT | sections))


def test_layers_of_ones_own_are_not_asked_for_what_was_given(world: dynmo.World) -> None:
    model = dynmo.Sequential([nn.Linear(8, 8), nn.Linear(8, 8)])
    options: dict[str, Any] = {"recompute": "auto", "memory_limit": "1GiB", "micro_batch": 4}
    with pytest.raises(ConfigError, match=r"'all' or a list of layers: layers of one's own have"):
        dynmo.Pipeline(model, world, microbatches=2, **grouped(options))
