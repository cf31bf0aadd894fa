"""Reads the batches of a rank, and makes the keys that identify microbatches.

A rank reads batches only if its stages need them.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import torch
from torch import Tensor

from dynmo import Pipeline
from dynmo.config import Config
from dynmo.data.batches import Batches
from dynmo.data.order import Order, windows_of
from dynmo.dynamism.options import Freezing
from dynmo.errors import ConfigError
from dynmo.models.model import Model
from dynmo.runtime.comm.agreement import agree, maxima
from dynmo.runtime.comm.world import World
from dynmo.train.text import check_tokens, open_text


class Batch(NamedTuple):
    """The data of a rank for one step.

    Attributes:
        inputs: int64 [microbatches x micro_batch, sequence]. None on ranks with neither the first
            nor the last layer.
        targets: Like the inputs.
        keys: Keys for the cache of a frozen prefix's outputs. None if nothing is cached.
    """

    inputs: Tensor | None
    targets: Tensor | None
    keys: list[tuple[int, ...]] | None


class DataLoader:
    """Reads the data of one mesh. A reshape, or a move of an end, makes it anew.

    Only the ranks that hold the first or the last layer read data. They compare the data that they
    read.
    """

    fault = None  # a window is never broken

    def __init__(self, config: Config, world: World, pipeline: Pipeline, model: Model) -> None:
        self._config, self._device, self._pipeline = config, world.device, pipeline
        train, options = config.train, model.options or config.model
        sequence = config.model.sequence
        order = (
            train.global_batch,
            train.micro_batch,
            config.seed,
            config.data.shuffle,
        )
        self._batches: Batches | None = None
        check_tokens(config.data.source, options)
        digest, length = None, 0
        if pipeline.needs_data:
            corpus = open_text(config.data.source, options)
            length = len(corpus)
            self._batches = Batches(corpus, sequence, *order, shifted=options.kind != "hf")
            ends = corpus[: 1 << 20].tobytes() + corpus[-(1 << 20) :].tobytes()
            digest = hashlib.sha256(f"{length} ".encode() + ends).digest()
        agree(world, digest, "the data (data.source)")
        length = int(maxima(world, (length,))[0])
        self._order = Order(windows_of(length, sequence), *order) if pipeline.caches else None
        evaluates_again = train.eval_every and train.steps // train.eval_every > 1
        if self._order is not None and not evaluates_again and not self._order.repeats(train.steps):
            freezing = config.dynamism.named["freezing"]
            assert isinstance(freezing, Freezing)
            raise ConfigError(
                f"dynamism.freezing.cache_bytes = {freezing.cache_bytes}: no "
                f"microbatch comes again within {train.steps} steps, so nothing would be cached; "
                "evaluate at least twice (train.eval_every), or train for more than an epoch, "
                "which has "
                f'{self._order.windows} sequences, with data.shuffle = "batches"'
            )

    def train(self, step: int) -> Batch:
        """Returns this replica's microbatches of a step.

        The replicas' microbatches follow one another in the batch.
        """
        own, replica = self._pipeline.microbatches, self._pipeline.replica
        part = slice(replica * own, (replica + 1) * own)
        inputs = targets = keys = None
        if self._batches is not None:
            inputs, targets = self._to_device(*(x[part] for x in self._batches.train(step)))
        if self._order is not None and self._order.repeats(self._config.train.steps):
            keys = [tuple(windows) for windows in self._order.train(step)[part].tolist()]
        return Batch(inputs, targets, keys)

    def held_out(self, microbatches: int) -> Batch:
        """Returns so many microbatches to evaluate on, the same every time."""
        inputs = targets = keys = None
        if self._batches is not None:
            pairs = [self._batches.held_out(i) for i in range(microbatches)]
            inputs, targets = self._to_device(*(torch.stack(x) for x in zip(*pairs, strict=True)))
        if self._order is not None:
            keys = [tuple(self._order.held_out(i).tolist()) for i in range(microbatches)]
        return Batch(inputs, targets, keys)

    def close(self) -> None:
        """Has nothing to end."""

    def _to_device(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Joins microbatches to a batch, and moves it to the device.

        A copy from pinned memory runs beside the device's computations.
        """
        device, pair = self._device, (inputs.flatten(0, 1), targets.flatten(0, 1))
        if device.type == "cuda":
            pair = (
                pair[0].pin_memory().to(device, non_blocking=True),
                pair[1].pin_memory().to(device, non_blocking=True),
            )
        return pair
