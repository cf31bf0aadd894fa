"""Jobs of the pool's ranks for the tests of damaged checkpoints."""

from __future__ import annotations

import contextlib
import io
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dynmo
from dynmo.config import parse
from dynmo.errors import DynmoError
from dynmo.runtime.comm.meeting import Meeting
from dynmo.train.setup import model_of
from dynmo.train.trainer import Trainer

STEPS = 4


def train(world: Meeting, config: dict[str, Any], folder: str) -> str:
    """Trains in a folder, and returns the digest of the weights."""
    loaded = parse(config)
    return Trainer(loaded, world, model_of(loaded), Path(folder)).run().weights_digest


def resume_each(world: Meeting, config: dict[str, Any], folders: list[str]) -> list[dict[str, Any]]:
    """Resumes a run in each of these folders, and says how that ended."""
    loaded = parse(config)

    def resume(folder: str) -> str:
        trainer = Trainer(loaded, world, model_of(loaded), Path(folder), resume=True)
        return trainer.run().weights_digest

    return [_ended(resume, folder) for folder in folders]


def _pipeline(world: Meeting, config: dict[str, Any]) -> dynmo.Pipeline:
    torch.manual_seed(config.get("seed", 0))
    layers = [nn.Linear(4, 4) for _ in range(4)]
    model = dynmo.Sequential(layers, loss=nn.functional.mse_loss)
    return dynmo.Pipeline(model, world, microbatches=2, schedule="1f1b", balance="none")


def _to_the_end(pipeline: dynmo.Pipeline, folder: str | None = None) -> str:
    while pipeline.steps < STEPS:
        inputs = torch.randn(4, 4, generator=torch.Generator().manual_seed(pipeline.steps))
        pipeline.step(inputs, inputs.roll(1))
        if folder is not None:
            pipeline.save(Path(folder, "checkpoints"), keep=9)
    return pipeline.digest()


def loop(world: Meeting, config: dict[str, Any], folder: str) -> str:
    """A loop of one's own that saves after each step. Returns the digest of the weights."""
    return _to_the_end(_pipeline(world, config), folder)


def load_each(world: Meeting, config: dict[str, Any], folders: list[str]) -> list[dict[str, Any]]:
    """Goes on with `Pipeline.load` from each of these folders, and says how that ended."""

    def go_on(folder: str) -> str:
        pipeline = _pipeline(world, config)
        pipeline.load(Path(folder, "checkpoints"))
        return _to_the_end(pipeline)

    return [_ended(go_on, folder) for folder in folders]


def _ended(go_on: Callable[[str], str], folder: str) -> dict[str, Any]:
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            how: dict[str, Any] = {"digest": go_on(folder)}
        except DynmoError as error:
            how = {"status": error.exit_status, "text": str(error)}
        except Exception:
            how = {"status": None, "text": traceback.format_exc()}
    return {**how, "said": said.getvalue().splitlines()}
