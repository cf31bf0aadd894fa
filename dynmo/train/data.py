"""The data of a run, as its config asks for it: text or samples."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dynmo import Loader, Pipeline
from dynmo.config import Config
from dynmo.data.batches import Batches, Microbatch, SampleBatches
from dynmo.data.corpus import VOCAB, Corpus, TokenFile, check_vocab, open_corpus
from dynmo.data.options import DataOptions
from dynmo.data.order import Order, held_out_text, windows_in
from dynmo.data.records import WithHeldOut, open_records
from dynmo.data.stream import HELD_OUT, open_stream
from dynmo.data.tokenizer import has_tokenizer, load_tokenizer, tokens_of
from dynmo.errors import ConfigError
from dynmo.models.model import Model
from dynmo.models.options import ModelOptions
from dynmo.models.rows import batches_of


def order_of(config: Config, lengths: Sequence[int]) -> Order:
    """Returns the order of windows or samples, by the tokens or records of each source."""
    train, data = config.train, config.data
    if not data.has_samples:
        lengths = windows_in(config.model.sequence, *lengths)
    windows, own = (*lengths, 0)[:2]
    batch = train.global_batch, train.micro_batch
    return Order(windows, *batch, config.seed, data.shuffle, data.held_out_share, own)


def tokenizer_of(options: ModelOptions) -> Any:
    """Returns the tokenizer of the model's folder. None if there is none."""
    folder = Path(options.path)
    if options.kind != "hf" or not has_tokenizer(folder):
        return None
    return load_tokenizer(folder, options.vocab, options.trust_remote_code)


# -- text ------------------------------------------------------------------------------------------


def check_tokens(source: str, options: ModelOptions) -> None:
    """Raises ConfigError if the model cannot read the tokens that a text has."""
    if source.startswith("tokens:"):
        open_text(source, options)
    elif tokenizer_of(options) is None:
        _check_bytes(options)


def _check_bytes(options: ModelOptions) -> None:
    if options.kind == "hf" and options.vocab < VOCAB:
        raise ConfigError(
            f"{options.path} has no tokenizer, and its model has {options.vocab} tokens, fewer "
            f"than the {VOCAB} bytes; save the tokenizer there"
        )
    if options.kind != "emulated":
        check_vocab(options.vocab)


def open_text(source: str, options: ModelOptions) -> Corpus:
    """Returns the tokens of a text: bytes, a tokenizer's, or those of a file.

    Args:
        source: "stdlib", "file:PATH" or "tokens:PATH".
        options: Those of the model, with the vocabulary of its folder.
    """
    if not source.startswith("tokens:"):
        return _tokens(source, options) if options.kind == "hf" else open_corpus(source)
    tokens = TokenFile(Path(source.removeprefix("tokens:")))
    if options.kind != "emulated" and tokens.vocab > options.vocab:
        raise ConfigError(
            f'data.source = "{source}": its tokens go up to {tokens.vocab - 1}, and the model '
            f"has {options.vocab}; use the model's own tokenizer, or a greater model.vocab"
        )
    return tokens


# A reshape opens the same texts again.
@lru_cache(maxsize=2)
def _tokens(source: str, options: ModelOptions) -> Corpus:
    corpus, tokenizer = open_corpus(source), tokenizer_of(options)
    if tokenizer is None:
        _check_bytes(options)
        return corpus
    return tokens_of(corpus, tokenizer, source)


class Batch(NamedTuple):
    """The data of a rank for one step.

    Attributes:
        inputs: Text: int64 [microbatches x micro_batch, sequence]. Samples: their microbatches.
            None on ranks with neither the first nor the last layer.
        targets: Like the inputs of text. None with samples, which have them.
        samples: The numbers of each microbatch's windows. None if no case asks for them, or no
            microbatch comes again.
    """

    inputs: Tensor | list[Microbatch] | None
    targets: Tensor | None
    samples: list[tuple[int, ...]] | None


def _digest(corpus: Corpus) -> bytes:
    ends = corpus[: 1 << 20].tobytes() + corpus[-(1 << 20) :].tobytes()
    return hashlib.sha256(f"{len(corpus)} ".encode() + ends).digest()


class TextLoader:
    """Reads the text of one mesh. A reshape, or a move of an end, makes it anew.

    Only the ranks that hold the first or the last layer read data, or all with `elastic.recover`.

    Args:
        compares: Whether the ranks that read compare their data. All call it together then.
    """

    fault = None  # a window is never broken

    def __init__(
        self, config: Config, pipeline: Pipeline, model: Model, compares: bool = True
    ) -> None:
        device = pipeline.mesh.world.device
        self._steps, self._device, self._pipeline = config.train.steps, device, pipeline
        train, data, options = config.train, config.data, model.options or config.model
        self._batches: Batches | None = None
        for source in data.sources:
            check_tokens(source, options)
        digest, lengths = None, [0] * len(data.sources)
        if pipeline.needs_data:
            corpora = [open_text(source, options) for source in data.sources]
            lengths = [*map(len, corpora)]
            self._batches = Batches(
                corpora[0],
                config.model.sequence,
                train.global_batch,
                train.micro_batch,
                config.seed,
                data.shuffle,
                shifted=options.kind != "hf",
                held_out=corpora[1] if len(corpora) > 1 else data.held_out_share,
            )
            digest = b"".join(map(_digest, corpora))
        if compares:
            lengths = pipeline.mesh.compared(digest, lengths)
        self._order = order_of(config, lengths)
        self.evaluates_on = held_out_text(
            data.sources[-1], self._order.held_out_windows, "sequences"
        )
        self._numbers = pipeline.cases.wants_samples
        evaluates_again = train.eval_every and train.steps // train.eval_every > 1
        if self._numbers and not evaluates_again and not self._order.repeats(train.steps):
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
        if self._numbers and self._order.repeats(self._steps):
            samples = [tuple(windows) for windows in self._order.train(step)[part].tolist()]
        return Batch(inputs, targets, samples)

    again = train

    def evaluation(self, microbatches: int) -> Batch:
        """Returns so many microbatches to evaluate on, the same every time."""
        inputs = targets = samples = None
        if self._batches is not None:
            pairs = [self._batches.held_out(i) for i in range(microbatches)]
            inputs, targets = self._to_device(*(torch.stack(x) for x in zip(*pairs, strict=True)))
        if self._numbers:
            samples = [tuple(self._order.held_out(i).tolist()) for i in range(microbatches)]
        return Batch(inputs, targets, samples)

    def state_dict(self) -> dict[str, Any]:
        """Is empty, because the number of a step says all."""
        return {}

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


# -- samples ---------------------------------------------------------------------------------------


class SampleLoader(Loader):
    """Reads the samples of a run. It follows the mesh by itself."""

    def train(self, step: int) -> Batch:
        """Returns this replica's microbatches of a step, which is the next one."""
        del step
        return Batch(next(self), None, None)

    def again(self, step: int) -> Batch:
        """Returns them once more, for the present mesh. A stream only goes on."""
        return Batch(self.drawn(step), None, None)

    def evaluation(self, microbatches: int) -> Batch:
        """Returns so many microbatches to evaluate on, the same every time."""
        return Batch(self.held_out(microbatches), None, None)


def open_data(
    config: Config,
    pipeline: Pipeline,
    model: Model,
    state: Mapping[str, Any] | None = None,
    compares: bool = True,
) -> TextLoader | SampleLoader:
    """Returns the data of a run. Samples go on from a state, or from the pipeline's step.

    `compares` is that of `TextLoader`.

    Raises:
        ConfigError: The data cannot be read, or the model cannot be trained on it.
    """
    if not config.data.has_samples:
        return TextLoader(config, pipeline, model, compares)
    return SampleLoader(
        pipeline,
        config.data.source,
        _tokenizer_of_samples(config, model),
        micro_batch=config.train.micro_batch,
        sequence=config.model.sequence,
        seed=config.seed,
        **config.data.model_dump(include=set(DataOptions.model_fields)),
        state=state or {"step": pipeline.steps},
    )


def open_batches(config: Config, model: Model) -> SampleBatches:
    """Returns all batches of a run. Raises the errors that its loader would raise."""
    data, tokenizer = config.data, _tokenizer_of_samples(config, model)
    source, *others = data.sources
    if data.streaming:
        records = open_stream(source, data.block, config.seed, held_out=0 if others else HELD_OUT)
    else:
        records = open_records(source)
    for other in others:
        records = WithHeldOut(records, open_records(other, "data.held_out"))
    return batches_of(
        records,
        tokenizer,
        model,
        data,
        global_batch=config.train.global_batch,
        micro_batch=config.train.micro_batch,
        sequence=config.model.sequence,
        seed=config.seed,
    )


def _tokenizer_of_samples(config: Config, model: Model) -> Any:
    options = model.options or config.model
    if options.kind != "hf":
        raise ConfigError(
            f"data.source has samples, which need a model of kind hf, not {options.kind}; use text "
            "(file:PATH)"
        )
    return tokenizer_of(options)
