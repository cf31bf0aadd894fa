"""Jobs of the ranks of the random test.

Each function takes the job's world first.
"""

from __future__ import annotations

import os
import traceback
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from dynmo.config import parse
from dynmo.data.batches import Batches
from dynmo.data.corpus import open_corpus
from dynmo.errors import DynmoError
from dynmo.event_log import to_json
from dynmo.events import Event
from dynmo.runtime.comm.meeting import Meeting
from dynmo.train.run import come_back
from dynmo.train.setup import model_of
from dynmo.train.trainer import Trainer
from tests.equality import decay_groups


def train(
    world: Meeting, config: dict[str, Any], folder: str | None = None, resume: bool = False
) -> dict[str, Any]:
    """Train as one rank and say how it ended.

    Args:
        world: Meeting of all ranks.
        config: The run.
        folder: Where the run saves, if it does.
        resume: Whether to go on from the newest checkpoint there.

    Returns:
        `events`, which only rank 0 sees, and the result, or the `error` that ended the run: its
        class, `status`, `text`.
    """
    events: list[Event] = []
    try:
        loaded = parse(config)
        path = None if folder is None else Path(folder)
        model = model_of(loaded)
        trainer = Trainer(loaded, world, model, path, resume, listen=events.append)
        result = trainer.run()
        while result.left and (later := come_back(trainer)) is not None:
            result = later
    except DynmoError as error:
        return _ended(events, error=type(error).__name__, status=error.exit_status, text=str(error))
    except Exception as error:
        return _ended(events, error=type(error).__name__, status=None, text=traceback.format_exc())
    return _ended(events, **vars(result))


def train_on_machines(world: Meeting, config: dict[str, Any], **others: Any) -> dict[str, Any]:
    """As `train`, on two machines, so that rank 0 is often among the first to leave."""
    drawn = Random(1009 * config.get("seed", 0) + world.rank).choice("abbb")
    machine = drawn if world.rank else "a"
    with mock.patch.dict(os.environ, {"SLURMD_NODENAME": machine}):
        return train(world, config, **others)


def _ended(events: list[Event], **how: Any) -> dict[str, Any]:
    return {"events": [to_json(event) for event in events], **how}


def train_plainly(world: Meeting, config: dict[str, Any]) -> list[float]:
    """The losses of the same training in a plain PyTorch loop.

    The loop runs over the model's layers.
    """
    loaded = parse(config)
    train, model = loaded.train, model_of(loaded)
    layers = nn.ModuleList(model.build(range(model.layers)))
    batches = Batches(
        open_corpus(loaded.data.source),
        loaded.model.sequence,
        train.global_batch,
        train.micro_batch,
        loaded.seed,
        loaded.data.shuffle,
    )
    groups = decay_groups(layers, getattr(loaded.optimizer, "weight_decay", 0.0))
    options: dict[str, Any] = {}
    if train.optimizer == "adamw":
        options = {"lr": 0.0, "betas": train.betas, "eps": train.eps}
    elif train.optimizer == "sgd":
        options = {"lr": 0.0, "momentum": train.momentum}
    classes = {name.lower(): getattr(torch.optim, name) for name in dir(torch.optim)}
    parameters = groups if options else [p for group in groups for p in group["params"]]
    optimizer: torch.optim.Optimizer = classes[train.optimizer](parameters, **options)
    losses: list[float] = []
    for step in range(train.steps):
        for group in optimizer.param_groups:
            group["lr"] = train.at(step, train.steps, train.lr)
        inputs, targets = batches.train(step)
        optimizer.zero_grad()
        total = 0.0
        for x, y in zip(inputs, targets, strict=True):
            loss = _loss(layers, x, model.loss, y) / len(inputs)
            loss.backward()
            total += loss.item()
        if train.max_grad_norm:
            nn.utils.clip_grad_norm_(layers.parameters(), train.max_grad_norm)
        optimizer.step()
        losses.append(total)
    return losses


def _loss(layers: nn.ModuleList, x: Any, loss: Any, targets: Tensor) -> Tensor:
    for layer in layers:
        x = layer(*x) if isinstance(x, tuple) else layer(x)
    return loss(x, targets)
