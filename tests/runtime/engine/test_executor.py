"""Any program gives the bits of one process, also with several stages per rank."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import pytest

from tests.combinations import mostly_matrix
from tests.pool import Pool

EXECUTE = "tests.runtime.jobs.executor:execute"
LAYERS = 8


@cache
def reference(pool: Pool, microbatches: int, frozen: int) -> dict[str, Any]:
    """One rank runs one F and one BW at a time."""
    rows = " ".join(
        f"{s}F{j}" if kind == "F" else f"{s}BW{j}"
        for j in range(microbatches)
        for kind, s in _in_turn(frozen)
    )
    text = (
        f"# one  ranks=1 microbatches={microbatches} placement={','.join('0' * LAYERS)} "
        f"first_trainable={frozen}\n0 | {rows}\n"
    )
    return merged(pool.run(EXECUTE, 1, schedule=text, layers=LAYERS, microbatches=microbatches))


def _in_turn(frozen: int) -> list[tuple[str, int]]:
    return [("F", s) for s in range(LAYERS)] + [("B", s) for s in reversed(range(frozen, LAYERS))]


def merged(results: list[dict[str, Any]]) -> dict[str, Any]:
    assert all(r["left"] == 0 for r in results), "a microbatch left something behind"
    gradients = {name: value for r in results for name, value in r["gradients"].items()}
    (losses,) = [r["losses"] for r in results if r["losses"] is not None]
    return {"losses": losses, "gradients": gradients}


def test_reference_has_gradients_of_trainable_layers_only(pool: Pool) -> None:
    for frozen in (0, 4):
        one = reference(pool, 5, frozen)
        for name, gradients in one["gradients"].items():
            for gradient in gradients:
                assert (gradient is None) == (int(name.split(".")[0]) < frozen)
        assert len(set(one["losses"])) == 2


PLACEMENTS = ("0110", "0101", "0011", "01", "0123", "0120")


@pytest.mark.parametrize(
    ("placement", "frozen", "seed"),
    mostly_matrix(
        product(PLACEMENTS, (0, 1, 3), (0, 1)),
        everyday=[(each, (0, 1, 3)[n % 3], n % 2) for n, each in enumerate(PLACEMENTS)],
    ),
)
def test_any_order_of_ops_gives_the_bits_of_one_rank(
    pool: Pool, placement: str, frozen: int, seed: int
) -> None:
    """The schedules are random. Every stage is fused or split."""
    ranks, stages = int(max(placement)) + 1, len(placement)
    frozen = min(frozen, stages - 1)
    schedule = [[int(rank) for rank in placement], seed]
    results = pool.run(
        EXECUTE, ranks, schedule=schedule, layers=LAYERS, microbatches=5, frozen=frozen
    )
    assert merged(results) == reference(pool, 5, frozen * LAYERS // stages)
