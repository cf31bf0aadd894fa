"""Families train on two ranks with the bits of a plain loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.combinations import mostly_matrix
from tests.models.huggingface.trained import FAMILIES, SCHEDULES, plain
from tests.pool import Pool


@pytest.mark.parametrize("family", mostly_matrix(FAMILIES, ("gpt2",)))
def test_two_ranks_train_like_transformers(pool: Pool, family: str, tmp_path: Path) -> None:
    """Each use of a tied weight sums its gradients over the microbatches."""
    wanted, weights = plain(family, apart=True)
    job = "tests.models.huggingface.trained:train"
    for losses in pool.run(job, 2, family=family, folder=str(tmp_path))[0]:
        assert losses == wanted
    for schedule in SCHEDULES:
        values = torch.load(tmp_path / schedule)
        assert values.keys() == weights.keys()
        assert [name for name in weights if not torch.equal(values[name], weights[name])] == []


def test_tied_weights_differ_in_the_order_of_sums_only() -> None:
    losses, weights = plain("gpt2", apart=False)
    found, values = plain("gpt2", apart=True)
    assert found == pytest.approx(losses, rel=1e-6)
    assert any(not torch.equal(values[name], weights[name]) for name in weights)
    for name, value in weights.items():
        torch.testing.assert_close(values[name], value, rtol=0, atol=1e-6)
