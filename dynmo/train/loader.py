"""Reads the batches of a rank, with the numbers of their samples.

A rank reads batches only if its stages need them.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from dynmo import Pipeline
from dynmo.config import Config
from dynmo.data.batches import Batches, windows_in
from dynmo.data.corpus import Corpus
from dynmo.data.order import Order, held_out_of, held_out_text
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
        samples: The numbers of each microbatch's windows. None if no case asks for them, or no
            microbatch comes again.
    """

    inputs: Tensor | None
    targets: Tensor | None
    samples: list[tuple[int, ...]] | None


def _digest(corpus: Corpus) -> bytes:
    ends = corpus[: 1 << 20].tobytes() + corpus[-(1 << 20) :].tobytes()
    return hashlib.sha256(f"{len(corpus)} ".encode() + ends).digest()


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
        data = config.data
        order = (train.global_batch, train.micro_batch, config.seed, data.shuffle)
        self._batches: Batches | None = None
        sources = data.sources
        for source in sources:
            check_tokens(source, options)
        digest, lengths = None, (0,) * len(sources)
        if pipeline.needs_data:
            corpora = [open_text(source, options) for source in sources]
            lengths = tuple(map(len, corpora))
            self._batches = Batches(
                corpora[0],
                sequence,
                *order,
                shifted=options.kind != "hf",
                held_out=corpora[1] if len(corpora) > 1 else data.held_out_share,
            )
            digest = b"".join(map(_digest, corpora))
        agree(world, digest, "the data (data.source)")
        windows, own = windows_in(sequence, *map(int, maxima(world, lengths)))
        self.evaluates_on = held_out_text(
            sources[-1], own or held_out_of(windows, data.held_out_share), "sequences"
        )
        self._order = (
            Order(windows, *order, data.held_out_share, own)
            if pipeline.cases.wants_samples
            else None
        )
        evaluates_again = train.eval_every and train.steps // train.eval_every > 1
        if self._order is not None and not evaluates_again and not self._order.repeats(train.steps):
            facts = replace(config.facts(model.layers, on_cuda=False), comes_again=False)
            for problem in facts.problems():
                raise ConfigError(problem)

    def train(self, step: int) -> Batch:
        """Returns this replica's microbatches of a step.

        The replicas' microbatches follow one another in the batch.
        """
        own, replica = self._pipeline.mesh.microbatches, self._pipeline.mesh.replica
        part = slice(replica * own, (replica + 1) * own)
        inputs = targets = samples = None
        if self._batches is not None:
            inputs, targets = self._to_device(*(x[part] for x in self._batches.train(step)))
        if self._order is not None and self._order.repeats(self._config.train.steps):
            samples = [tuple(windows) for windows in self._order.train(step)[part].tolist()]
        return Batch(inputs, targets, samples)

    def held_out(self, microbatches: int) -> Batch:
        """Returns so many microbatches to evaluate on, the same every time."""
        inputs = targets = samples = None
        if self._batches is not None:
            pairs = [self._batches.held_out(i) for i in range(microbatches)]
            inputs, targets = self._to_device(*(torch.stack(x) for x in zip(*pairs, strict=True)))
        if self._order is not None:
            samples = [tuple(self._order.held_out(i).tolist()) for i in range(microbatches)]
        return Batch(inputs, targets, samples)

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
