"""The figures of a dry run, compared with hand computations and measured runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dynmo.config import parse
from dynmo.errors import ConfigError, NoRoomError, PartitionError
from dynmo.pipeline.dry_run import RunPlan, _first_of
from dynmo.pipeline.shape_costs import shape_costs
from dynmo.runtime.optim.precision import PRECISIONS
from dynmo.train.setup import model_of, plan_run
from tests.combinations import mostly_matrix
from tests.runtime.alone import pipeline, run_step

TINY: dict[str, Any] = {
    "model": {"blocks": 1, "hidden": 8, "heads": 2, "sequence": 4},
    "train": {"micro_batch": 2, "global_batch": 10},
    "parallel": {"pipeline": 2},
    "pipeline": {"schedule": "1f1b"},
}
TOKENS = 2 * 4  # of a microbatch
EMBEDDING = 256 * 8
ATTENTION = 8 + 3 * 64 + 64
FEED_FORWARD = 8 + 2 * 32 * 8 + 32 * 8
HEAD = 8 + 8 * 256
OF_A_LAYER = ("weight", "gradient", "activation", "stash", "output")

# Bytes of rotary tables: cosine and sine of a sequence of 4, for 2 heads of 4 numbers, 2 pairs
# each.
TABLES = (0, 2 * 4 * 2 * 4, 0, 0)


def test_parameters_and_static_bytes() -> None:
    costs = shape_costs(parse(TINY).options, model_of(parse(TINY)))
    assert [c.parameters for c in costs] == [EMBEDDING, ATTENTION, FEED_FORWARD, HEAD]
    # The bytes are float32 weights, as many gradients, two moments each, and the attention's rotary
    # tables.
    assert [(c.weight_bytes, c.gradient_bytes, c.optimizer_bytes) for c in costs] == [
        (4 * c.parameters + table, 4 * c.parameters, 8 * c.parameters)
        for c, table in zip(costs, TABLES, strict=True)
    ]
    assert [c.output_bytes for c in costs] == [TOKENS * 8 * 4] * 3 + [4]
    assert [c.rollback_bytes for c in costs] == [0] * 4
    for rollback, copied in (("exact", 12), ("in-place", 0)):
        config = parse(TINY | {"pipeline": {"post_validation": True, "rollback": rollback}})
        assert [c.rollback_bytes for c in shape_costs(config.options, model_of(config))] == [
            copied * c.parameters for c in costs
        ]


def test_stash_bytes_match_a_hand_computation() -> None:
    """W needs the embedding's ids, the inputs of linears, and the output gradients of both."""
    costs = shape_costs(parse(TINY).options, model_of(parse(TINY)))
    embedding = TOKENS * 8 + 4 * TOKENS * 8
    attention = 4 * TOKENS * ((8 + 3 * 8) + (8 + 8))
    feed_forward = 4 * TOKENS * ((8 + 2 * 32) + (32 + 8))
    head = 4 * TOKENS * (8 + 256)
    assert [c.stash_bytes for c in costs] == [embedding, attention, feed_forward, head]
    assert costs[0].activation_bytes == embedding


def test_memory_of_1f1b_matches_a_hand_computation() -> None:
    """The first rank has two microbatches in flight, and the last one has one. No W is pending."""
    config = parse(TINY)
    costs = shape_costs(config.options, model_of(config))
    plan = plan_run(config)
    assert plan.partition == (2, 2)
    assert plan.parameters == (EMBEDDING + ATTENTION, FEED_FORWARD + HEAD)
    for rank, in_flight in enumerate((2, 1)):
        own = costs[2 * rank : 2 * rank + 2]
        # A step's five messages, small as they are, are all posted at once. Each rank holds most in
        # the B after the first W, when there are gradients: it has then taken two messages. (The
        # last as much in the F before it.)
        messages = 3 * costs[1].output_bytes
        first, second = own
        workspace = max(
            second.workspace_bytes,
            first.workspace_bytes - second.activation_bytes + second.stash_bytes * rank,
        )
        held = sum(16 * c.parameters + in_flight * c.activation_bytes for c in own)
        tables = sum(TABLES[2 * rank : 2 * rank + 2])
        assert plan.memory[rank] == held + messages + workspace + tables
    assert plan.to_json()["microbatches"] == 5
    assert "names" not in plan.to_json()
    assert plan.table().row_count == 2


@pytest.mark.parametrize("sequence", [4, 64])
def test_predicted_bytes_match_a_measured_run(sequence: int) -> None:
    """Attention keeps no tensor that grows with the square of the sequence."""
    config = parse(TINY | {"model": TINY["model"] | {"sequence": sequence}})
    model = model_of(config)
    costs, pipe = shape_costs(config.options, model), pipeline(model)
    text = torch.randint(256, (3, 2, sequence + 1))
    run_step(pipe, 0, text[..., :-1], text[..., 1:], lr=0.1)
    measured = pipe.costs()
    for field in ("parameters", *(f"{of}_bytes" for of in OF_A_LAYER)):
        assert [getattr(c, field) for c in costs] == [getattr(c, field) for c in measured], field


def test_dry_run_allocates_no_memory() -> None:
    """The model is far larger than the memory of this machine."""
    huge = {"blocks": 1, "hidden": 131072, "heads": 256}
    plan = plan_run(parse(TINY | {"model": huge, "train": {"micro_batch": 8}}))
    assert sum(plan.parameters) > 1e11
    assert min(plan.memory) > 16 * min(plan.parameters)


def _limited(limit: int, **train: object) -> RunPlan:
    pipeline = {"schedule": "1f1b", "memory_limit": limit}
    return plan_run(parse(_with(**train) | {"pipeline": pipeline}))


def test_memory_limit_is_checked_to_the_byte() -> None:
    wanted = max(plan_run(parse(TINY)).memory)
    assert _limited(wanted).limit == wanted
    says = f"rank 1 needs {wanted} bytes .* pipeline.memory_limit = {wanted - 1}"
    with pytest.raises(PartitionError, match=f"{says}; .*train.recompute = 'auto'"):
        _limited(wanted - 1)
    with pytest.raises(PartitionError, match=r"^[^']*$"):  # it is on already
        _limited(1, recompute="all")


@pytest.mark.parametrize("replicas", [1, 2])
def test_later_mesh_divides_the_optimizer_state_by_its_own_replicas(replicas: int) -> None:
    train = {"micro_batch": 1, "global_batch": 8, "reduction_slots": 4}

    def planned(now: int, **more: object) -> RunPlan:
        mesh = {"parallel": {"pipeline": 2, "replicas": now, "zero": 1}}
        return plan_run(parse(TINY | {"train": train} | mesh | more))

    def changed(limit: int) -> RunPlan:
        pipeline = {"schedule": "1f1b", "memory_limit": limit}
        return planned(4, pipeline=pipeline, elastic={"reshape_at": [[3, 2, replicas]]})

    placements = ({"initial": [first, 4 - first]} for first in (1, 2, 3))
    wanted = min(max(planned(replicas, balance=given).memory) for given in placements)
    assert changed(wanted).limit == wanted
    with pytest.raises(NoRoomError, match=f"reshape_at: .* needs {wanted} bytes, 1 over the limit"):
        changed(wanted - 1)


@pytest.mark.parametrize(
    "elastic",
    mostly_matrix([{"reshape_at": [[3, 2, 2]]}, {"target_ranks": 4}], [{"target_ranks": 4}]),
)
def test_later_mesh_holds_its_own_share_of_the_experts(elastic: dict[str, object]) -> None:
    moe = {"kind": "moe", "experts": 4, "blocks": 2, "hidden": 8, "heads": 2, "sequence": 4}
    train = {"micro_batch": 1, "global_batch": 8, "reduction_slots": 4}

    def planned(ranks: int, **more: object) -> RunPlan:
        mesh = {"pipeline": ranks, "replicas": 2, "expert": 2, "zero": 1}
        return plan_run(parse({"model": moe, "train": train, "parallel": mesh} | more))

    layers = len(planned(2).names)
    placements = ({"initial": [first, layers - first]} for first in range(1, layers))
    schedule = {"schedule": "1f1b"}
    wanted = min(max(planned(2, balance=given, pipeline=schedule).memory) for given in placements)
    fits, lacks = (
        {"pipeline": schedule | {"memory_limit": limit}, "elastic": elastic}
        for limit in (wanted, wanted - 1)
    )
    assert planned(3, **fits).limit == wanted
    with pytest.raises(NoRoomError, match=f"needs {wanted} bytes, 1 over the limit"):
        planned(3, **lacks)


def test_gpipe_keeps_every_microbatch() -> None:
    config = parse(TINY | {"pipeline": {"schedule": "gpipe"}})
    costs = shape_costs(config.options, model_of(config))
    memory = plan_run(config).memory
    for rank, own in enumerate((costs[:2], costs[2:])):
        # Before the first W there are no gradients.
        least = sum(12 * c.parameters + 5 * c.activation_bytes for c in own)
        # Beside these an op's workspace, gradients, and on the first rank five messages that may
        # land.
        most = (
            sum(4 * c.parameters for c in own)
            + max(c.workspace_bytes for c in own)
            + 5 * costs[1].output_bytes * (rank == 0)
        )
        assert least < memory[rank] <= least + most


def test_low_precision_halves_weights_but_not_gradients() -> None:
    costs = {
        name: shape_costs(config.options, model_of(config))
        for name in PRECISIONS
        for config in [parse(_with(precision=name))]
    }
    for wide, low, table in zip(costs["float32"], costs["bfloat16"], TABLES, strict=True):
        assert low.weight_bytes - table == (wide.weight_bytes - table) / 2
        assert low.gradient_bytes == wide.gradient_bytes
        assert low.optimizer_bytes == 12 * low.parameters  # a master and two moments
        assert low.activation_bytes < wide.activation_bytes
    assert [c.output_bytes for c in costs["bfloat16"]] == [TOKENS * 8 * 2] * 3 + [4]
    assert costs["float16"] == costs["bfloat16"]


def _with(**train: object) -> dict[str, Any]:
    return TINY | {"train": TINY["train"] | train}


def test_recompute_auto_is_used_if_memory_is_short() -> None:
    kept, recomputed = (plan_run(parse(_with(recompute=word))) for word in ("none", "all"))
    assert (kept.recompute, recomputed.recompute) == ((), (0, 1, 2, 3))
    assert max(recomputed.memory) < max(kept.memory)
    for limit in (max(kept.memory) - 1, max(recomputed.memory)):
        plan = _limited(limit, recompute="auto")
        assert max(plan.memory) <= limit
        assert plan.recompute
    assert not _limited(max(kept.memory), recompute="auto").recompute
    with pytest.raises(PartitionError, match="rank 0 needs"):
        _limited(min(recomputed.memory) // 2, recompute="auto")


def test_schedule_that_comes_closest_to_the_limit_is_planned() -> None:
    given = parse(TINY | {"pipeline": {"schedule": "auto"}})
    made, plans = plan_run(given), dict[str, RunPlan]()
    for place, name in enumerate(given.options.first_shapes(4)):
        plans[name] = replace(made, schedule=name, memory=(2, 9 - place), limit=1)
    closest = _first_of(given.options, model_of(given), plans.__getitem__)
    assert (len(plans) > 1, closest.memory) == (True, (2, 10 - len(plans)))


def test_emulated_layers_do_not_sleep() -> None:
    slow = {"kind": "emulated", "layers": 4, "bytes": 64, **dict.fromkeys("fbw", 1e6)}
    plan = plan_run(parse({"model": slow, "parallel": {"pipeline": 4}}))
    assert plan.parameters == (1, 1, 1, 1)


def test_input_errors_are_those_of_a_run() -> None:
    with pytest.raises(ConfigError, match=r"model.vocab = 100"):
        plan_run(parse(TINY | {"model": TINY["model"] | {"vocab": 100}}))
    own = {"model": {"kind": "python:tests.models.user_model:layers"}, "parallel": {"pipeline": 2}}
    with pytest.raises(ConfigError, match=r"balance.initial .*5 layers"):
        plan_run(parse(own | {"balance": {"initial": [1, 2]}}))
    meshes = {
        "parallel": {"replicas": 6},
        "elastic": {"reshape_at": [[3, 6, 1]]},
        "train": {"global_batch": 48, "micro_batch": 1, "reduction_slots": 24},
    }
    with pytest.raises(ConfigError, match=r"reshape_at: .*6 stages.*5 layers"):
        plan_run(parse(own | meshes))
    assert plan_run(parse(own | {"train": {"micro_batch": 4}})).partition == (3, 2)
