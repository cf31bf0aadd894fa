"""Microbatches of several lengths, and floating-point tensors that are only handed on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.pipeline.named_batches import plain_losses
from tests.pipeline.ragged_batches import HIDDEN, make_batch, make_layers
from tests.pool import Pool

JOBS = "tests.pipeline.ragged_batches:"


@pytest.fixture(scope="module")
def alone(pool: Pool) -> dict[str, Any]:
    return pool.run(JOBS + "train", 1)[0]


def test_losses_are_those_of_plain_torch(alone: dict[str, Any]) -> None:
    layers = nn.ModuleList(make_layers())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in layers.parameters() if p.dim() >= 2], "weight_decay": 0.01},
            {"params": [p for p in layers.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ],
    )
    losses = plain_losses(layers, optimizer, [make_batch(step, 4) for step in range(6)], 1.0)
    assert alone["losses"] == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {"schedule": "zb-auto"}),
        (3, {"moves": True}),
        (2, {"recompute": "all"}),
        (4, {"replicas": 2, "schedule": "zb-v"}),
    ],
)
def test_any_ranks_have_the_bits_of_one(
    pool: Pool, alone: dict[str, Any], ranks: int, options: dict[str, Any]
) -> None:
    for told in pool.run(JOBS + "train", ranks, **options):
        assert told["losses"] == alone["losses"]
        assert told["weights"] == alone["weights"]
        assert told["evaluated"] == pytest.approx(alone["evaluated"], rel=1e-12)


def test_steps_that_are_taken_back_have_the_same_bits(pool: Pool) -> None:
    """Each step clips, so post-validation takes each back and begins the next anew."""
    (alone,) = pool.run(JOBS + "train", 1, max_grad_norm=0.05)
    options = {"schedule": "zb-v", "max_grad_norm": 0.05, "post_validation": True}
    for told in pool.run(JOBS + "train", 3, **options):
        assert (told["losses"], told["weights"]) == (alone["losses"], alone["weights"])


def test_the_largest_microbatch_counts_as_activations(pool: Pool, alone: dict[str, Any]) -> None:
    (short,) = pool.run(JOBS + "train", 1, steps=1)
    assert all(a > b for a, b in zip(alone["activations"], short["activations"], strict=True))


def test_tables_send_no_gradient_back_and_alike_steps_one_header(pool: Pool) -> None:
    first, last = pool.run(JOBS + "alike", 2, as_list=True)
    assert pool.run(JOBS + "alike", 2, as_list=False) == [first, last]
    steps, microbatches, rows, length = 3, 4, 3, 4
    header = 64 * 8
    hidden, table = rows * length * HIDDEN * 4, length * HIDDEN * 4
    assert first["bytes"] == steps * (header + microbatches * (hidden + 2 * table))
    assert last["bytes"] == steps * (header + microbatches * hidden)
    assert first["messages"] == steps * (1 + 3 * microbatches)
    assert last["messages"] == steps * (1 + microbatches)


def test_an_output_that_gets_a_gradient_later_trains_on_any_ranks(pool: Pool) -> None:
    alone = pool.run(JOBS + "fickle", 1)
    assert pool.run(JOBS + "fickle", 3) == alone * 3
