"""A training whose last layer runs in pieces, for the ranks of a pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import dynmo
from dynmo.huggingface import from_pretrained

WORDS, WIDTH, ROWS, TOKENS = 32, 8, 3, 10


def train(
    world: dynmo.World,
    folder: str | None = None,
    replicas: int = 1,
    schedule: str = "1f1b",
    **options: Any,
) -> dict[str, Any]:
    """Trains three steps of four microbatches over all replicas.

    Args:
        folder: A model of transformers. None means linear layers with a tied embedding.
    """
    each = 4 // replicas
    pipeline = dynmo.Pipeline(
        _own_model() if folder is None else from_pretrained(Path(folder)),
        world,
        microbatches=each,
        replicas=replicas,
        schedule=schedule,
        head_tokens=7,
        reduction_slots=2,
        balance="none",
        seed=1,
        **options,
    )
    random, results = torch.Generator().manual_seed(5), list[dynmo.StepResult]()
    for _ in range(3):
        ids = torch.randint(WORDS, (4, ROWS, TOKENS), generator=random)
        labels = ids.clone()
        labels[:, 1, 4:] = -100
        own = slice(pipeline.replica * each, (pipeline.replica + 1) * each)
        results += pipeline.advance(ids[own].flatten(0, 1), labels[own].flatten(0, 1))
    results += pipeline.drain()
    return {"losses": [result.loss for result in results], "weights": pipeline.digest()}


def _own_model() -> dynmo.Model:
    torch.manual_seed(3)
    layers = [
        nn.Embedding(WORDS, WIDTH),
        *(nn.Linear(WIDTH, WIDTH) for _ in range(4)),
        nn.Linear(WIDTH, WORDS, bias=False),
    ]
    tied = [((0, "weight"), (5, "weight"))]
    return dynmo.Sequential(layers, loss=dynmo.next_token_loss, tied=tied)
