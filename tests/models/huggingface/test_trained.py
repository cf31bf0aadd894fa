"""Families train on two ranks with the bits of a plain loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.models.huggingface.trained import FAMILIES, Trained, plain
from tests.pool import Pool

EVERYDAY = ("gemma",)


def trained(pool: Pool, family: str, folder: Path, schedule: str) -> Trained:
    job = "tests.models.huggingface.trained:train"
    losses = pool.run(job, 2, family=family, folder=str(folder), schedule=schedule)[0]
    return losses, torch.load(folder / "weights")


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family in EVERYDAY else pytest.mark.matrix)
        for family in FAMILIES
    ],
)
def test_two_ranks_train_like_transformers(pool: Pool, family: str, tmp_path: Path) -> None:
    """Each use of a tied weight sums its gradients over the microbatches."""
    losses, weights = plain(family, apart=True)
    for schedule in ("zb-h1", "zb-v"):
        found, values = trained(pool, family, tmp_path, schedule)
        assert found == losses
        assert values.keys() == weights.keys()
        assert [name for name in weights if not torch.equal(values[name], weights[name])] == []


def test_tied_weights_differ_in_the_order_of_sums_only(pool: Pool, tmp_path: Path) -> None:
    losses, weights = plain("gemma", apart=False)
    found, values = trained(pool, "gemma", tmp_path, "zb-h1")
    assert found == pytest.approx(losses, rel=1e-6)
    for name, value in weights.items():
        torch.testing.assert_close(values[name], value, rtol=0, atol=1e-6)
