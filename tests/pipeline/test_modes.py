"""Modules train and evaluate as their owner set them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynmo
from tests.pipeline.own_modes import STEPS, batch, layers, make, modes
from tests.pool import Pool

JOBS = "tests.pipeline.own_modes:"
EXPECTED = {
    "0": [],
    "1": ["dropout.0"],
    "2": ["dropout", "dropout.0", "dropout.1"],
    "3": ["dropout.1"],
    "4": ["", "linear", "dropout", "dropout.0", "dropout.1"],
}


def test_modes_hold_over_moves_and_resumes(pool: Pool, tmp_path: Path) -> None:
    whole = pool.run(JOBS + "train", 1, folder=str(tmp_path))[0]
    assert whole["modes"] == EXPECTED
    runs: list[tuple[int, dict[str, Any]]] = [
        (2, {"moves": True, "recompute": "all"}),
        (3, {"moves": True, "schedule": "zb-auto"}),
        (2, {"folder": str(tmp_path), "resumes": True}),
    ]
    for ranks, options in runs:
        told = pool.run(JOBS + "train", ranks, **options)
        assert {key: value for each in told for key, value in each["modes"].items()} == EXPECTED
        assert {each["weights"] for each in told} == {whole["weights"]}
        assert told[0]["losses"] == whole["losses"][-len(told[0]["losses"]) :]
        assert told[0]["evaluated"] == pytest.approx(whole["evaluated"], rel=1e-12)


def test_numbers_of_modules_hold_over_moves(pool: Pool) -> None:
    assert pool.run(JOBS + "rates", 2) == pool.run(JOBS + "rates", 1) * 2


def test_model_in_evaluation_mode_trains_without_dropout(world: dynmo.World) -> None:
    """It has the bits of a model without dropout, and trains like plain torch."""
    made, without, plain = layers(), layers(rate=0.0), nn.Sequential(*layers()).eval()
    nn.Sequential(*made).eval()
    pipeline, same = make(world, made), make(world, without)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(STEPS):
        pipeline.step(*batch(step))
        same.step(*batch(step))
        optimizer.zero_grad()
        for inputs, targets in zip(*(x.split(3) for x in batch(step)), strict=True):
            (nn.functional.mse_loss(plain(inputs), targets) / 3).backward()
        optimizer.step()
    assert pipeline.digest() == same.digest()
    for theirs, ours in zip(plain.parameters(), nn.Sequential(*made).parameters(), strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-6, atol=1e-7)


def test_modes_are_put_back_after_an_evaluation_that_fails(world: dynmo.World) -> None:
    class Fragile(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            if not self.training:
                raise ValueError("no evaluation")
            return super().forward(input)

    made = layers()
    made[1].get_submodule("dropout.0").eval()
    pipeline = make(world, [*made, Fragile(8, 8)])
    before = modes(pipeline)
    with pytest.raises(ValueError, match="no evaluation"):
        pipeline.evaluate(*batch(0))
    assert modes(pipeline) == before != {index: [] for index in range(6)}


def test_a_train_of_the_owner_is_called(world: dynmo.World) -> None:
    """Some modules merge weights for an evaluation, and part them again."""

    class Merging(nn.Linear):
        merged = False

        def train(self, mode: bool = True) -> Merging:
            self.merged = not mode
            return super().train(mode)

        def forward(self, input: Tensor) -> Tensor:
            assert self.merged != self.training
            return super().forward(input)

    pipeline = make(world, [*layers(), nn.Sequential(Merging(8, 8))])
    for step in range(2):
        pipeline.step(*batch(step))
        pipeline.evaluate(*batch(step))


def test_saved_modes_win_with_a_warning(
    world: dynmo.World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = make(world, layers())
    first.mesh.modules[2].get_submodule("dropout").eval()
    first.step(*batch(0))
    first.save(tmp_path)
    with caplog.at_level(logging.WARNING):
        second = make(world, layers(), resume=tmp_path)
    assert modes(second) == modes(first)
    assert "dropout of layer 2 (2.Block) was in evaluation mode in " in caplog.text


def test_cached_outputs_are_of_the_present_modes(pool: Pool) -> None:
    losses = pool.run(JOBS + "cached", 2, cache="1 MiB")
    assert losses == pool.run(JOBS + "cached", 2, cache="0")
    assert losses[0][1] != losses[0][2]
