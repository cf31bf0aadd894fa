"""User models with unusual outputs, buffers or dtypes.

Training gives the same bits on any ranks, or a one-line error.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dynmo.pipeline.actions import Actions
from dynmo.plan.partition import Partition
from dynmo.runtime.engine.batch_check import StepBatch
from dynmo.schedule.catalogue import SCHEDULES
from tests.combinations import mostly_matrix
from tests.equality import RANDOM_MOVES, with_sections
from tests.fuzz.jobs import train_plainly
from tests.jobs import SOURCE
from tests.pool import JobFailed, Pool
from tests.runtime.alone import MICROBATCHES, alone, gpt, run_step

STEPS = 4
CONSTANT = {"lr": 0.05, "decay": "constant", "warmup": 0}


def config(function: str, ranks: int = 1, **changes: dict[str, Any]) -> dict[str, Any]:
    """Layers move at each step where there are ranks to move between."""
    path = function if ":" in function else f"tests.models.odd_models:{function}"
    sections: dict[str, dict[str, Any]] = {
        "model": {"kind": f"python:{path}", "sequence": 8},
        "train": {"steps": STEPS, "global_batch": 8, "micro_batch": 2} | CONSTANT,
        "parallel": {"pipeline": ranks, "timeout": 20.0},
        "balance": {"balancer": RANDOM_MOVES, "every": 1} if ranks > 1 else {"balancer": "none"},
        "trace": {"steps": 0},
    }
    return with_sections(sections, changes)


def run(pool: Pool, function: str, ranks: int = 1, **changes: dict[str, Any]) -> dict[str, Any]:
    ended = pool.run("train", ranks, config=config(function, ranks, **changes))
    assert len({x["digest"] for x in ended}) == 1
    return ended[0]


def plain_losses(function: str) -> list[float]:
    """Losses of the same steps in a plain PyTorch loop, without clipping."""
    wanted = config(function, train={"max_grad_norm": 0.0}) | {"data": {"source": SOURCE}}
    return train_plainly(alone(), wanted)


@pytest.mark.parametrize(
    "function",
    mostly_matrix(
        ["columns", "table", "energy", "spectral", "in_place", "narrow"],
        everyday=["columns", "energy", "in_place"],
    ),
)
def test_unusual_models_have_the_same_bits_on_any_ranks(pool: Pool, function: str) -> None:
    """Models with unusual outputs, buffers or dtypes.

    Outputs and buffers are column-major. Some layers run a backward in F, write to buffers in F,
    work in place, or use a rare dtype.
    """
    unclipped = {"max_grad_norm": 0.0}
    first = run(pool, function, train=unclipped)
    assert first["losses"] == pytest.approx(plain_losses(function), rel=1e-5)
    recompute = unclipped | {"recompute": "all"}
    for ranks, schedule, train in ((2, "zb-h1", unclipped), (3, "gpipe", recompute)):
        other = run(pool, function, ranks, train=train, pipeline={"schedule": schedule})
        assert (other["losses"], other["digest"]) == (first["losses"], first["digest"])


NO_CLIPPING: dict[str, Any] = {"max_grad_norm": 0.0, "eval_every": 2, "eval_batches": 2}


def numbers(
    pool: Pool, function: str, ranks: int = 1, **changes: dict[str, Any]
) -> tuple[list[float], list[float], dict[str, Any]]:
    """All losses, held-out losses, and the digests of weights and buffers."""
    changes["train"] = NO_CLIPPING | changes.get("train", {})
    told = pool.run("events", ranks, config=config(function, ranks, **changes))[0]
    digests = {key: value for key, value in told[-1].items() if key.endswith("digest")}
    losses, held_out = (
        [e["loss"] for e in told if e["event"] == kind] for kind in ("step", "eval")
    )
    return losses, held_out, digests


@pytest.mark.parametrize(
    "function", mostly_matrix(["statistics", "checkpointed"], everyday=["checkpointed"])
)
def test_running_statistics_are_those_of_one_rank(pool: Pool, function: str) -> None:
    """This holds with recompute and with every schedule. Layers move at each step."""
    expected = numbers(pool, function)
    assert expected[2].keys() >= {"weights_digest", "buffers_digest"}
    assert numbers(pool, function, 2, train={"recompute": "all"}) == expected
    for schedule in SCHEDULES if function == "statistics" else ("zb-v",):
        assert numbers(pool, function, 2, pipeline={"schedule": schedule}) == expected, schedule


def test_rollback_restores_running_statistics(pool: Pool) -> None:
    clipped, afterwards = {"max_grad_norm": 0.3}, {"post_validation": True}
    expected = numbers(pool, "statistics", train=clipped)
    recompute = clipped | {"recompute": "all"}
    assert numbers(pool, "statistics", 2, train=recompute, pipeline=afterwards) == expected
    in_place = afterwards | {"rollback": "in-place"}
    near = numbers(pool, "statistics", train=clipped, pipeline=in_place)
    assert near[1] == pytest.approx(expected[1], rel=1e-4)


def test_b_reads_the_buffer_value_of_its_microbatch(pool: Pool) -> None:
    """Several microbatches are in flight, each with its own value of the buffer."""
    expected = run(pool, "averaged", pipeline={"schedule": "1f1b"})
    for ranks, schedule in ((1, "gpipe"), (3, "zb-h2")):
        other = run(pool, "averaged", ranks, pipeline={"schedule": schedule})
        assert (other["losses"], other["digest"]) == (expected["losses"], expected["digest"])


@pytest.mark.parametrize(
    "function", ["recurrent", "caching", "rewriting", "rectified", "writes_to_the_batch"]
)
def test_layers_with_effects_have_the_same_bits_on_any_ranks(pool: Pool, function: str) -> None:
    """Layers that keep tensors, write to their inputs, or take other kernels without a graph.

    A loss also gets copies of its targets. No other user sees a changed input.
    """
    expected = numbers(pool, function)
    if function == "rewriting":
        assert numbers(pool, "copying") == expected
    assert numbers(pool, function, train={"recompute": "all"}) == expected
    assert numbers(pool, function, 2, pipeline={"schedule": "zb-h1"}) == expected


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("a_dict", r"layer 1 \(Do\) returned a dict"),
        ("with_none", r"layer 1 \(Do\) returned a NoneType"),
        ("complex_between", r"layer 1 \(Do\) .* torch.complex64"),
        ("writes_late", r"layer 1 \(Late\) writes to its input in place"),
        ("counting", r"layer 1 \(Counting\): .* attribute 'calls'"),
        ("no_graph", "the loss does not depend on the model's output"),
        ("no_tensor", "the loss function returned a float"),
        ("eighths", "layer 1: seen is of torch.float8_e5m2"),
    ],
)
def test_unsupported_models_are_refused(pool: Pool, function: str, reason: str) -> None:
    with pytest.raises(JobFailed, match=reason):
        run(pool, function)


RAGGED = "tests.models.ragged_model:"


def test_ragged_batches_have_the_same_bits_on_any_ranks(pool: Pool) -> None:
    """Every message has its own shape in both directions. Layers move at each step."""
    function = RAGGED + "ragged"
    recompute = {"train": {"recompute": "all"}, "pipeline": {"schedule": "zb-v"}}
    assert numbers(pool, function, 2, **recompute) == numbers(pool, function)
    clipped = {"max_grad_norm": 0.3}
    taken_back = numbers(pool, function, 3, train=clipped, pipeline={"post_validation": True})
    assert taken_back == numbers(pool, function, train=clipped)


@pytest.mark.parametrize("ranks", [1, 3])
def test_undeclared_varying_shapes_are_refused(pool: Pool, ranks: int) -> None:
    refused = r"layer 1 \(Undeclared\) returned .* in microbatch 1, .* varying_shapes = True"
    with pytest.raises(JobFailed, match=refused):
        run(pool, RAGGED + "undeclared", ranks, parallel={"timeout": 3.0})


def test_renormalised_weights_of_replicas_are_refused(pool: Pool) -> None:
    run(pool, "renormalised", 2)
    with pytest.raises(JobFailed, match=r"layer 0: .* max_norm"):
        pool.run("train", 2, config=config("renormalised", 1, parallel={"replicas": 2}))


def test_running_statistics_of_replicas_are_refused(pool: Pool) -> None:
    with pytest.raises(JobFailed, match=r"layer 1 \(Normed\): .* buffer 'norm.mean'"):
        numbers(pool, "own_norm", 2, parallel={"pipeline": 1, "replicas": 2})


def test_training_leaves_the_callers_random_state_unchanged() -> None:
    pipe = gpt(dropout=0.2)
    ids = torch.zeros(MICROBATCHES, 2, 8, dtype=torch.int64)
    torch.manual_seed(5)
    expected, drawn = torch.rand(3), list[Tensor]()
    torch.manual_seed(5)
    for step in range(3):
        run_step(pipe, step, ids, ids, lr=0.1)
        drawn.append(torch.rand(1))
        pipe.evaluate(StepBatch(ids, ids), MICROBATCHES)
        Actions(pipe).move(Partition((pipe.model.layers,)))
    assert torch.equal(torch.cat(drawn), expected)
