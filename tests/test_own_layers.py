"""User layers that are built in unusual ways or pass on several tensors.

Training gives the same bits on any ranks, or a one-line error.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dynmo.cases.freezing.egeria import plasticity, quantised, relations
from dynmo.config import parse
from dynmo.errors import ConfigError
from dynmo.train.setup import model_of
from tests.models.odd_layers import Shared
from tests.pool import JobFailed, Pool
from tests.test_own_models import config, plain_losses, run

HERE = "tests.models.odd_layers:"


@pytest.mark.parametrize("function", ["attributes", "shared", "tapes", "transformed", "containers"])
def test_own_layers_train_like_plain_torch(pool: Pool, function: str) -> None:
    first = run(pool, HERE + function, train={"max_grad_norm": 0.0})
    assert first["losses"] == pytest.approx(plain_losses(HERE + function), rel=1e-5)
    assert run(pool, HERE + function, 2, train={"max_grad_norm": 0.0})["digest"] == first["digest"]


@pytest.mark.parametrize("function", ["aux", "many", "kinds"])
def test_layers_with_several_tensors_have_one_digest(pool: Pool, function: str) -> None:
    digest = run(pool, HERE + function)["digest"]
    recompute: dict[str, Any] = {"pipeline": {"schedule": "gpipe"}, "train": {"recompute": "all"}}
    assert run(pool, HERE + function, 2)["digest"] == digest
    if function != "many":
        assert run(pool, HERE + function, 3, **recompute)["digest"] == digest


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("too_many", r"layer 1 \(Spread\) returned 5001 .* 4096"),
        ("eighths", r"layer 1 \(Low\) .* torch.float8_e5m2"),
        ("sparse", r"layer 1 \(Sparse\) .* torch.sparse_coo"),
        ("empty", r"layer 1 \(Empty\) returned an empty tuple"),
        ("keyed", r"the forward of layer 1 \(Keyed\) takes x by keyword alone"),
        ("counting", r"layer 1 \(Counting\): .* attribute 'count'"),
    ],
)
def test_unsupported_layers_are_refused(pool: Pool, function: str, reason: str) -> None:
    with pytest.raises(JobFailed, match=reason):
        run(pool, HERE + function)


def test_a_scripted_module_is_refused() -> None:
    with pytest.raises(ConfigError, match="layer 1 is a ScriptModule"):
        model_of(parse(config(HERE + "scripted"))).build(range(3))


# -- cases -----------------------------------------------------------------------------------------


def test_egeria_reference_leaves_a_shared_module_unchanged() -> None:
    module, x = Shared(), torch.randn(2, 8)
    reference, before = quantised(module), list(module.parameters())
    assert plasticity(module, reference, (x,), relations(module(x)), (0, 0, 1)) > 0
    assert all(p is q for p, q in zip(module.parameters(), before, strict=True))


def test_egeria_without_freezing_changes_no_weights(pool: Pool) -> None:
    """Egeria compares layers with their references while they move.

    With this tolerance it freezes no layer.
    """
    options = {"policy": "egeria", "every": 1, "window": 2, "tolerance": 1e-9}
    watched = {"cases": ["freezing"], "freezing": options}
    train = {"steps": 8}
    plain = run(pool, HERE + "shared", train=train)
    v_min = {"schedule": "v-min"}
    other = run(pool, HERE + "shared", 2, train=train, dynamism=watched, pipeline=v_min)
    assert other["digest"] == plain["digest"]


def pruning(dense_below: float) -> dict[str, Any]:
    options = {"final_sparsity": 0.8, "start": 1, "end": 2, "every": 1, "dense_below": dense_below}
    return {"dynamism": {"cases": ["pruning"], "pruning": options}, "train": {"eval_every": 1}}


def held_out(pool: Pool, function: str, ranks: int, **changes: Any) -> list[float]:
    told = pool.run("events", ranks, config=config(function, ranks, **changes))[0]
    return [event["loss"] for event in told if event["event"] == "eval"]


def test_pruned_encoder_layers_evaluate_the_same_on_any_ranks(pool: Pool) -> None:
    """Sparse weights stay sparse in evaluation.

    torch's fast path of the encoder layer would read them as dense weights.
    """
    sparse = held_out(pool, HERE + "encoders", 1, **pruning(0.5))
    assert held_out(pool, HERE + "encoders", 2, **pruning(0.5)) == sparse
    assert held_out(pool, HERE + "encoders", 1, **pruning(0.99)) == pytest.approx(sparse, rel=1e-5)


@pytest.mark.parametrize("dense_below", [0.5, 0.99], ids=["sparse", "under a mask"])
def test_pruned_weight_used_outside_its_linear_is_refused(pool: Pool, dense_below: float) -> None:
    with pytest.raises(JobFailed, match="layer 1 uses the weight of 'linear' by itself"):
        run(pool, HERE + "by_itself", **pruning(dense_below))
