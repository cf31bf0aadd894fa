"""Small models of transformers, and trainings of them for the pool of ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

import dynmo
from dynmo.models.huggingface.frame import Frame
from dynmo.models.huggingface.model import from_pretrained
from dynmo.models.huggingface.shells import Shell
from dynmo.runtime.comm.world import World

VOCAB, ROWS, TOKENS = 96, 12, 9

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


def config_of(kind: str, **options: Any) -> PreTrainedConfig:
    """Makes a small config of a model type, such as "llama"."""
    return AutoConfig.for_model(kind, **{**SIZES, **options})


def frame_of(model: dynmo.Model) -> Frame:
    first = model.build(())[0]
    assert isinstance(first, Shell)
    return first.frame


def make_batch(step: int, padded: bool) -> dict[str, Tensor]:
    """Makes a batch of 12 rows. Labels that do not count are uneven over the microbatches."""
    draws = torch.Generator().manual_seed(step)
    ids = torch.randint(VOCAB, (ROWS, TOKENS), generator=draws)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if padded:
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
        mask[4, 5:] = 0
        batch["attention_mask"] = mask
        batch["labels"][mask == 0] = -100
    return batch


def train(
    world: World,
    kind: str = "llama",
    padded: bool = True,
    config: dict[str, Any] | None = None,
    move: tuple[int, ...] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Trains a few steps. Returns losses and digest."""
    model = from_pretrained(config_of(kind, **(config or {})))
    pipeline = dynmo.Pipeline(model, world, microbatches=4, **options)
    losses = list[float]()
    for step in range(4):
        if step == 2 and move is not None:
            pipeline.move(move)
        losses.append(pipeline.step(make_batch(step, padded)).loss)
    return {"losses": losses, "weights": pipeline.digest(), "names": model.names}
