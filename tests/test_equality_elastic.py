"""Same numbers while ranks leave and come back.

The digest is that of one rank. A failed change of ranks loses no state.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import pytest

from tests.combinations import mostly_matrix
from tests.equality import BALANCERS, IN_EMULATED_TIME, deeper, fields_of, run, with_sections
from tests.pool import Pool

DOWN_AND_UP, GROWTH = [[2, 2, 1], [5, 4, 1]], [[4, 3, 1]]


def _case(name: str, **options: Any) -> dict[str, Any]:
    return {"dynamism": {"cases": [name], name: options}}


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "freezing": _case("freezing", schedule=[[1, 3], [4, 5]]),
    "pruning": _case("pruning", initial_sparsity=0.5, start=1, end=6, every=2),
    "sparse attention": _case("sparse_attention", buckets=4),
    "early exit": _case("early_exit", threshold=0.001, exits=[0, 2], start=1),
    "depths": _case("mixture_of_depths", capacity=0.3, threshold_from=4),
    "experts": {"model": {"kind": "moe", "experts": 4, "routing": "bias"}} | _case("experts"),
    "tied": {"model": {"tied": True}},
    "float16": {"train": {"precision": "float16"}},
    "post-validation": {"pipeline": {"post_validation": True}},
}


def wanted(
    case: str, ranks: int, schedule: str = "zb-h1", **sections: dict[str, Any]
) -> dict[str, Any]:
    base = deeper(ranks, schedule, BALANCERS["random" if ranks > 1 else "none"], freezing=False)
    base["train"] |= {"eval_every": 3, "eval_batches": 2, "max_grad_norm": 0.5, "global_batch": 6}
    return with_sections(with_sections(base, CASES[case]), sections)


def told(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The results that must not depend on where the run was."""
    changes = fields_of(events, "change", "step", "case", "layers")
    return {
        "steps": fields_of(events, "step", "step", "loss", "gradient_norm"),
        "evaluations": fields_of(events, "eval", "loss", "dense_loss"),
        "changes": [change for change in changes if change[1] != "experts"],
        "end": fields_of(events, "end", "loss", "weights_digest", "buffers_digest"),
    }


@cache
def reference(pool: Pool, case: str, groups: int = 1) -> dict[str, Any]:
    return told(run(pool, wanted(case, 1, train={"reduction_slots": groups}), "events")[0])


def sizes(events: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Every change of ranks: step, from, to."""
    keys = ("step", "ranks_before", "ranks_after")
    return sorted(x for kind in ("repack", "grow") for x in fields_of(events, kind, *keys))


@pytest.mark.parametrize("case", mostly_matrix(CASES, everyday=["post-validation"]))
def test_ranks_leave_and_come_back(pool: Pool, case: str) -> None:
    config = wanted(case, 4, elastic={"reshape_at": DOWN_AND_UP, "park": True})
    results = run(pool, config, "train_elastic")
    events = results[0]["events"]
    assert sizes(events) == [(2, 4, 2), (5, 2, 4)]
    assert told(events) == reference(pool, case)
    assert len({result["digest"] for result in results}) == 1


@pytest.mark.parametrize(
    ("case", "zero"),
    mostly_matrix(
        product([case for case in CASES if case != "tied"], (0, 1)), everyday=[("freezing", 1)]
    ),
)
def test_replicas_leave_and_come_back(pool: Pool, case: str, zero: int) -> None:
    shapes = [[1, 3, 1], [3, 2, 2], [5, 1, 2], [6, 4, 1]]
    config = wanted(
        case,
        2,
        train={"reduction_slots": 2},
        parallel={"pipeline": 2, "replicas": 2, "zero": zero},
        elastic={"reshape_at": shapes, "park": True},
    )
    results = run(pool, config, "train_elastic")
    assert sizes(results[0]["events"]) == [(1, 4, 3), (3, 3, 4), (5, 4, 2), (6, 2, 4)]
    assert told(results[0]["events"]) == reference(pool, case, groups=2)


@pytest.mark.matrix
@pytest.mark.parametrize("zero", [0, 1])
def test_replicas_that_share_experts_stay_together(pool: Pool, zero: int) -> None:
    config = wanted(
        "experts",
        2,
        train={"reduction_slots": 2},
        parallel={"pipeline": 2, "replicas": 2, "expert": 2, "zero": zero},
        dynamism={"experts": {"place_every": 2, "redundant": 1}},
        elastic={"reshape_at": [[2, 1, 2], [5, 2, 2]], "park": True},
    )
    results = run(pool, config, "train_elastic")
    assert sizes(results[0]["events"]) == [(2, 4, 2), (5, 2, 4)]
    assert told(results[0]["events"]) == reference(pool, "experts", groups=2)


@pytest.mark.matrix
@pytest.mark.parametrize("schedule", ["zb-v", "zb-auto"])
def test_ranks_leave_and_come_back_with_other_schedules(pool: Pool, schedule: str) -> None:
    config = wanted("plain", 4, schedule, elastic={"reshape_at": DOWN_AND_UP, "park": True})
    results = run(pool, config, "train_elastic")
    assert told(results[0]["events"]) == reference(pool, "plain")


def test_ranks_leave_for_good(pool: Pool) -> None:
    config = wanted("plain", 4, elastic={"reshape_at": [[3, 1, 1]]})
    results = run(pool, config, "train_elastic")
    assert [result["left"] for result in results] == [False, True, True, True]
    assert told(results[0]["events"]) == reference(pool, "plain")


def test_rank_0_leaves_and_comes_back(pool: Pool) -> None:
    """Another rank takes over, and calls it back behind the others."""
    elastic = {"reshape_at": [[2, 2, 1], [5, 3, 1]], "park": True}
    config = wanted("plain", 3, elastic=elastic)
    former, leader, _ = run(pool, config, "tests.train.elastic_jobs:small_machine_first")
    assert [event["step"] for event in former["events"] if event["event"] == "step"] == [0, 1]
    events = former["events"] + leader["events"]
    assert sizes(events) == [(2, 3, 2), (5, 2, 3)]
    (left,), (joined,) = fields_of(events, "repack", "left"), fields_of(events, "grow", "joined")
    assert left == joined
    returned = [seconds for (seconds,) in fields_of(events, "step", "gpu_seconds_returned")]
    assert returned == sorted(returned)
    assert told(events) == reference(pool, "plain")
    assert not former["left"]
    assert former["digest"] == leader["digest"]


def with_newcomer(pool: Pool, config: dict[str, Any], newcomer: str) -> list[dict[str, Any]]:
    return pool.run("tests.train.elastic_jobs:with_newcomer", 3, config=config, newcomer=newcomer)


def test_joining_rank_gets_the_same_digest(pool: Pool) -> None:
    results = with_newcomer(pool, wanted("pruning", 2, elastic={"reshape_at": GROWTH}), "joins")
    assert sizes(results[0]["events"]) == [(4, 2, 3)]
    assert told(results[0]["events"]) == reference(pool, "pruning")
    assert results[2]["digest"] == results[0]["digest"]


@pytest.mark.parametrize(
    ("newcomer", "limit", "why"),
    [
        ("stays away", 1.0, "rank 0 waited 1 s for rank 2 to join"),
        ("has no room", 60.0, "layers could not be moved (rank 2): no room for a layer"),
        ("has other code", 1.0, "was refused: it differs from the run in own.py"),
    ],
)
def test_failed_join_keeps_the_mesh_and_the_digest(
    pool: Pool, newcomer: str, limit: float, why: str
) -> None:
    config = wanted("plain", 2, elastic={"reshape_at": GROWTH, "join_timeout": limit})
    results = with_newcomer(pool, config, newcomer)
    events = results[0]["events"]
    assert any(why in what for (what,) in fields_of(events, "fault", "what"))
    assert fields_of(events, "fault", "step")[-1] == (4,)
    assert newcomer != "has other code" or "own.py" in results[2]["error"]
    assert sizes(events) == []
    assert told(events) == reference(pool, "plain")


@pytest.mark.parametrize(
    ("limit", "timeout"),
    mostly_matrix([(0.1, 60.0), (2.2, 2.0)], [(0.1, 60.0)]),
    ids=["short", "long"],
)
def test_growth_without_newcomers_keeps_the_mesh(pool: Pool, limit: float, timeout: float) -> None:
    """The run waits as long as it is told to, also for longer than any other wait may be."""
    config = wanted("plain", 2, elastic={"reshape_at": GROWTH, "join_timeout": limit})
    config["parallel"]["timeout"] = timeout
    events = run(pool, config, "train_elastic")[0]["events"]
    ((what,),) = fields_of(events, "fault", "what")
    assert f"waited {limit:g} s for 1 more rank" in what
    assert told(events) == reference(pool, "plain")


def test_failed_layer_transfer_keeps_all_ranks(pool: Pool) -> None:
    config = wanted("plain", 3, elastic={"reshape_at": [[4, 2, 1]]}, balance=BALANCERS["none"])
    results = run(pool, config, "tests.train.elastic_jobs:cannot_give")
    events = results[0]["events"]
    ((what,),) = fields_of(events, "fault", "what")
    assert "layers could not be moved (rank 2): no memory to pack" in what
    assert not any(result["left"] for result in results)
    assert told(events) == reference(pool, "plain")


@pytest.mark.matrix
def test_repack_shrinks_and_grows_the_run(pool: Pool) -> None:
    """Three quarters of the emulated layers freeze at step 10 and thaw at step 36."""
    config = {
        "model": {"kind": "emulated", "layers": 16, "f": 0.3, "b": 0.3, "w": 0.3},
        "train": {"steps": 60, "global_batch": 8, "micro_batch": 1},
        "parallel": {"pipeline": 4},
        "balance": {"every": "auto"},
        "elastic": {"repack": True, "park": True, "tolerance": 0.2},
        "dynamism": {"cases": ["python:tests.cases.breathing:Breathing"]},
    }
    events = run(pool, config, IN_EMULATED_TIME, wrapped="train_elastic")[0]["events"]
    changes = sizes(events)
    assert changes[0][0] > 10, "nothing is saved before layers freeze"
    assert changes[0][2] < 4
    assert changes[-1][2] == 4, "layers that thaw need all ranks"
    for kind in ("repack", "grow"):
        assert all("ranks take" in reason for (reason,) in fields_of(events, kind, "reason"))
    assert fields_of(events, "end", "gpu_seconds_returned")[0][0] > 0
    still = run(pool, config | {"elastic": {}, "parallel": {}}, IN_EMULATED_TIME)[0]
    assert fields_of(events, "end", "weights_digest") == fields_of(still, "end", "weights_digest")


@pytest.mark.matrix
@pytest.mark.parametrize("algorithm", ["first-fit", "python:benchmarks.baselines.merging:halving"])
def test_published_repack_algorithm_merges_ranks_by_memory(pool: Pool, algorithm: str) -> None:
    """The algorithm merges ranks by memory alone."""
    config = wanted(
        "plain",
        4,
        balance={"balancer": "none", "every": 2},
        pipeline={"memory_limit": 1 << 30},
        elastic={"repack": True, "algorithm": algorithm, "min_ranks": 2},
    )
    events = run(pool, config, "train_elastic")[0]["events"]
    assert sizes(events) == [(2, 4, 2)]
    assert fields_of(events, "repack", "reason") == [(f"{algorithm}: 2 of 4 ranks by memory",)]
    assert told(events) == reference(pool, "plain")


def test_run_with_retune_finishes_after_a_shrink(pool: Pool) -> None:
    """The planner chooses the microbatch size, and the run continues to its end."""
    config = {
        "model": {"kind": "emulated", "layers": 6, "f": 0.1, "b": 0.1, "w": 0.1},
        "train": {"steps": 6, "global_batch": 8, "micro_batch": 2},
        "parallel": {"pipeline": 4},
        "balance": {"balancer": "none", "every": 4},
        "elastic": {"target_ranks": 2, "retune": True, "park": True},
    }
    events = run(pool, config, IN_EMULATED_TIME, wrapped="train_elastic")[0]["events"]
    assert sizes(events) == [(4, 4, 2)]
    before, after = fields_of(events, "repack", "micro_batch")[0][0]
    assert before == 2 != after
    assert [step for (step,) in fields_of(events, "step", "step")] == list(range(6))
    losses = fields_of(events, "step", "loss")
    assert all(loss == loss for (loss,) in losses)


def test_repack_keeps_all_ranks_if_fewer_are_too_slow(pool: Pool) -> None:
    config = {
        "model": {"kind": "emulated", "layers": 8, "f": 1.0, "b": 1.0, "w": 1.0},
        "train": {"steps": 7, "global_batch": 8, "micro_batch": 1},
        "parallel": {"pipeline": 4},
        "balance": {"every": 3},
        "elastic": {"repack": True},
    }
    events = run(pool, config, IN_EMULATED_TIME, wrapped="train_elastic")[0]["events"]
    assert sizes(events) == []


SLOW = "tests.train.elastic_jobs:at_speeds"


@pytest.mark.parametrize("repack", mostly_matrix([True, False], everyday=[True]))
def test_a_slow_rank_is_named_and_given_back(pool: Pool, repack: bool) -> None:
    """Its only layer holds up the others, so two ranks are faster without it."""
    config = {
        "model": {"kind": "emulated", "layers": 12, "speeds": [1, 0.1, 1]},
        "train": {"steps": 30, "global_batch": 4, "micro_batch": 1},
        "parallel": {"pipeline": 3},
        "elastic": {"repack": repack},
    }
    config["model"] |= dict.fromkeys("fbw", 1.0)
    results = run(pool, config, SLOW)
    events = results[0]["events"]
    ((named, rank, factor, twin),) = fields_of(
        events, "slow_rank", "step", "rank", "factor", "twin"
    )
    assert (rank, factor, twin) == (1, 10, None)
    moves = fields_of(events, "rebalance", "step", "to")
    assert moves[0][0] < named
    assert moves[0][1][1] < 4, "it gets fewer layers before it is given back"
    assert [result["left"] for result in results] == [False, repack, False]
    assert sizes(events) == [(named, 3, 2)] * repack, "and the run asks for no other one"
    still = run(pool, config | {"elastic": {}, "parallel": {}}, IN_EMULATED_TIME)[0]
    assert fields_of(events, "end", "weights_digest") == fields_of(still, "end", "weights_digest")
