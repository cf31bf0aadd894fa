"""Batches for tiny models of transformers, and trainings for the pool of ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import dynmo
from dynmo.models.huggingface.layers import HuggingFaceLayer, SharedModel
from dynmo.pipeline.options import grouped
from dynmo.runtime.comm.meeting import Meeting
from tests.models.huggingface.tiny import VOCABULARY, model_of

ROWS, TOKENS = 12, 9


def shared_model_of(model: dynmo.Model) -> SharedModel:
    first = model.build(())[0]
    assert isinstance(first, HuggingFaceLayer)
    return first.shared_model


def make_batch(step: int, padded: bool) -> dict[str, Tensor]:
    """Makes a batch of 12 rows. Labels that do not count are uneven over the microbatches."""
    draws = torch.Generator().manual_seed(step)
    ids = torch.randint(VOCABULARY, (ROWS, TOKENS), generator=draws)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if padded:
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
        mask[4, 5:] = 0
        batch["attention_mask"] = mask
        batch["labels"][mask == 0] = -100
    return batch


def steps_of(
    pipeline: dynmo.Pipeline, steps: int, padded: bool, move: tuple[int, ...] | None
) -> dict[str, Any]:
    """Trains a few steps, and moves after two. Returns losses and digest."""
    losses = list[float]()
    for step in range(steps):
        if step == 2 and move is not None:
            pipeline.move(move)
        losses.append(pipeline.step(make_batch(step, padded)).loss)
    return {"losses": losses, "weights": pipeline.digest()}


def train(
    world: Meeting,
    kind: str = "llama",
    padded: bool = True,
    config: dict[str, Any] | None = None,
    move: tuple[int, ...] | None = None,
    **options: Any,
) -> dict[str, Any]:
    model = model_of(kind, **(config or {}))
    pipeline = dynmo.Pipeline(model, world, microbatches=4, **grouped(options))
    return steps_of(pipeline, 3, padded, move)
