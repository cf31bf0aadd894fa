"""Checkpoints without the frozen weights that a model's folder has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import dynmo
from dynmo.errors import CheckpointError


class Layer(nn.Linear):
    base_folder: str | None = None


def layers(seed: int, leaves_out: bool) -> list[nn.Module]:
    torch.manual_seed(seed)
    made = [Layer(64, 64) for _ in range(3)]
    made[0].requires_grad_(False)
    made[1].bias.requires_grad_(False)
    for layer in made:
        layer.base_folder = "folder" if leaves_out else None
    return [*made]


@pytest.fixture
def world() -> Iterator[dynmo.World]:
    with dynmo.init(device="cpu") as world:
        yield world


def trained(
    world: dynmo.World,
    folder: Path,
    seed: int,
    leaves_out: bool,
    steps: int,
    resume: Path | None = None,
) -> dynmo.Pipeline:
    model = dynmo.Sequential(layers(seed, leaves_out), loss=nn.functional.mse_loss)
    pipeline = dynmo.Pipeline(model, world, microbatches=2, resume=resume)
    for _ in range(steps):
        pipeline.step(torch.ones(4, 64), torch.zeros(4, 64))
    if resume is None:
        pipeline.save(folder)
    return pipeline


def test_a_run_goes_on_without_them(world: dynmo.World, tmp_path: Path) -> None:
    whole = trained(world, tmp_path / "whole", 0, leaves_out=False, steps=2)
    trained(world, tmp_path / "left-out", 0, leaves_out=True, steps=2)
    resumed = trained(world, tmp_path, 0, leaves_out=True, steps=2, resume=tmp_path / "left-out")
    for _ in range(2):
        whole.step(torch.ones(4, 64), torch.zeros(4, 64))
    assert resumed.digest() == whole.digest()
    sizes = [
        sum(file.stat().st_size for file in (tmp_path / name).rglob("*.safetensors"))
        for name in ("whole", "left-out")
    ]
    assert sizes[0] - sizes[1] > 64 * 64 * 4  # the weight of layer 0


def test_other_weights_are_refused(world: dynmo.World, tmp_path: Path) -> None:
    trained(world, tmp_path / "run", 0, leaves_out=True, steps=1)
    with pytest.raises(CheckpointError, match=r"layer 0 .*: weight is not the weight"):
        trained(world, tmp_path, 1, leaves_out=True, steps=1, resume=tmp_path / "run")
