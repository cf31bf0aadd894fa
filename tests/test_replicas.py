"""Replicas: at fixed reduction slots, any mesh gives the digest of one process, and so does one that changes its shape on the way."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import pytest

from tests.pool import Pool

STEPS = 6
RANDOM = {"balancer": "random", "every": 1}


def config(
    pipeline: int,
    data: int,
    *,
    slots: int | None = 4,
    zero: int = 0,
    schedule: str = "zb-h1",
    balance: dict[str, Any] | None = None,
    reshape_at: list[list[int]] | None = None,
    cases: bool = True,
    **model: Any,
) -> dict[str, Any]:
    """Six layers, eight microbatches; dropout, clipping, freezing. The embedding has several norm blocks, so that shares cut it."""
    made: dict[str, Any] = {
        "seed": 7,
        "model": {"blocks": 2, "hidden": 96, "heads": 2, "sequence": 8, "dropout": 0.1} | model,
        "train": {"steps": STEPS, "global_batch": 8, "micro_batch": 1, "lr": 1e-2, "warmup": 2, "max_grad_norm": 0.5},
        "parallel": {"pipeline": pipeline, "data": data, "zero": zero, "timeout": 20.0},
        "pipeline": {"schedule": schedule},
        "balance": balance or {"balancer": "none"},
        "dynamism": {"cases": ["freezing"], "freezing": {"schedule": [[2, 1], [4, 3]]}} if cases else {},
        "elastic": {"reshape_at": reshape_at or []},
        "trace": {"steps": 0},
    }
    if slots is not None:
        made["train"]["reduction_slots"] = slots
    return made


def run(pool: Pool, wanted: dict[str, Any]) -> list[dict[str, Any]]:
    parallel = wanted["parallel"]
    return pool.run("train", parallel["pipeline"] * parallel["data"], config=wanted)


@cache
def reference(pool: Pool, slots: int) -> dict[str, Any]:
    """One process, the same slots."""
    return run(pool, config(1, 1, slots=slots, schedule="1f1b"))[0]


def same(results: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    assert results[0]["losses"] == expected["losses"]
    assert {r["digest"] for r in results} == {expected["digest"]}
    assert {r["loss"] for r in results} == {expected["loss"]}


MESHES = [(1, 2), (1, 4), (2, 1), (2, 2), (4, 1)]


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("balance", [None, RANDOM], ids=["still", "random"])
@pytest.mark.parametrize(("pipeline", "data"), MESHES)
def test_one_digest(pool: Pool, pipeline: int, data: int, balance: dict[str, Any] | None, zero: int) -> None:
    results = run(pool, config(pipeline, data, zero=zero, balance=balance))
    same(results, reference(pool, 4))
    if balance and pipeline > 1:
        assert all(a != b for a, b in pairwise(results[0]["layers"])), "the layers did not move at every step"


def test_slots_change_the_bits(pool: Pool) -> None:
    """The order of the sum is a choice, and it is the slots' alone."""
    digests = {slots: reference(pool, slots)["digest"] for slots in (1, 2, 4, 8)}
    assert len(set(digests.values())) == 4
    assert run(pool, config(2, 2, slots=8))[0]["digest"] == digests[8]
    assert run(pool, config(2, 2, slots=None))[0]["digest"] == digests[2]
