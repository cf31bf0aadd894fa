"""What the data of a run is like: lengths of its samples, and its first batch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import mean, median
from typing import Any

import numpy as np

from dynmo.config import Config, with_options
from dynmo.data import IGNORED
from dynmo.data.batches import padding_of
from dynmo.data.order import held_out_text
from dynmo.data.records import BrokenSampleError, WithHeldOut
from dynmo.data.samples import Sample
from dynmo.errors import ConfigError
from dynmo.train.data import open_batches, open_text, order_of, tokenizer_of
from dynmo.train.setup import model_of

_MOST = 10_000  # samples that are encoded for their lengths; the others are only parsed
_GROUP = 1000  # samples after which progress is told
_SHOWN = 2
_NAMED = 20  # broken samples that are named


@dataclass(frozen=True)
class DataView:
    """What the data is like.

    Attributes:
        numbers: Counts and lengths, by name.
        histogram: Number of samples up to each length.
        microbatches: Rows and length of each microbatch of the first step.
        texts: The first samples, or the first window: pieces of text, and whether the loss counts
            them.
        warnings: What is wrong with the data, a line each.
        held_out: What evaluations read, in words.
    """

    numbers: dict[str, float]
    histogram: dict[int, int]
    microbatches: list[tuple[int, int]]
    texts: list[list[tuple[str, bool]]]
    warnings: list[str]
    held_out: str


def view_of(config: Config, listen: Callable[[int, int], None]) -> DataView:
    """Looks at the data of a run.

    Args:
        config: The run.
        listen: Called with how many samples are read, and how many there are.

    Raises:
        ConfigError: The data cannot be read.
    """
    return _samples(config, listen) if config.data.has_samples else _text(config)


def _samples(config: Config, listen: Callable[[int, int], None]) -> DataView:
    model = model_of(config)
    # A broken sample ends no view, which names all of them.
    given, config = config, with_options(config, ("data",), {"broken": "skip"})
    batches, tokenizer = open_batches(config, model), tokenizer_of(model.options or config.model)
    count = len(batches.records)
    looked = set(np.linspace(0, count - 1, min(count, _MOST)).astype(int).tolist())
    lengths, counted, special, cut = list[int](), 0, 0, 0
    longer = replace(batches.encoder, longest=batches.encoder.longest + 1)
    broken, named = 0, list[str]()
    others = len(batches.records.held_out) if isinstance(batches.records, WithHeldOut) else 0
    for at, number in enumerate((*range(count), *range(-others, 0))):
        if at % _GROUP == 0:
            listen(at, count + others)
        place = batches.records.place(number)
        try:
            record = batches.records[number]
            if number not in looked:
                batches.encoder.look(record, place)
                continue
            sample = batches.encoder.encode(record, place)
        except BrokenSampleError as error:
            broken += 1
            if len(named) < _NAMED:
                named.append(str(error))
            continue
        if len(sample.ids) == batches.encoder.longest:
            cut += len(longer.encode(record, place).ids) > len(sample.ids)
        special += batches.encoder.has_special(record)
        lengths.append(len(sample.ids))
        counted += sum(label != IGNORED for label in sample.labels[1:])
    listen(count + others, count + others)
    if not lengths:
        raise ConfigError(
            f"all {len(looked)} samples that were looked at are broken; the first one: {named[0]}"
        )
    # The first power of two that is no shorter than the longest ends the list.
    edges = [2**power for power in range(1, (max(lengths) - 1).bit_length() + 1)]
    first = batches.train(0)
    padding = padding_of(first)
    numbers = {
        "records": count,
        "held_out": batches.order.held_out_windows,
        "tokens": round(sum(lengths) / len(looked) * count),
        "looked_at": len(looked),
        "broken": broken,
        "shortest": min(lengths),
        "median": median(lengths),
        "mean": mean(lengths),
        "longest": max(lengths),
        "cut": cut,
        "counted": counted / sum(lengths),
        "padding": padding.padded / padding.tokens,
    }
    shown = list[list[tuple[str, bool]]]()
    for number in batches.order.train(0).ravel().tolist():
        with suppress(BrokenSampleError):
            shown.append(_pieces(batches.encoded(number), tokenizer))
    warnings = [f"broken: {text}" for text in named]
    if broken > _NAMED:
        warnings.append(f"broken: {broken - _NAMED} more")
    if broken and given.data.broken == "stop":
        warnings.append('a run ends at a broken sample; data.broken = "skip" leaves it out')
    if special:
        warnings.append(
            f"{special} of {len(lengths)} records have special tokens in their text, which are "
            "not added again; write the text without them if they do not belong there"
        )
    return DataView(
        numbers,
        {edge: sum(edge // 2 < length <= edge for length in lengths) for edge in edges},
        [(len(each["input_ids"]), each["input_ids"].shape[1]) for each in first],
        shown[:_SHOWN],
        warnings,
        held_out_text(config.data.sources[-1], batches.order.held_out_windows, "samples"),
    )


def _pieces(sample: Sample, tokenizer: Any) -> list[tuple[str, bool]]:
    """Returns the text of tokens that follow one another, and whether the loss counts them."""
    # The first token has no loss, for none comes before it.
    counts = [False, *(label != IGNORED for label in sample.labels[1:])]
    pieces = list[tuple[str, bool]]()
    for is_counted, group in groupby(zip(sample.ids, counts, strict=True), lambda pair: pair[1]):
        ids = [token for token, _ in group]
        pieces.append((_decoded(ids, tokenizer), is_counted))
    return pieces


def _decoded(ids: list[int], tokenizer: Any) -> str:
    return " ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(ids)


def _text(config: Config) -> DataView:
    model = model_of(config)
    options, train = model.options or config.model, config.train
    sequence = config.model.sequence
    corpora = [open_text(each, options) for each in config.data.sources]
    corpus, order = corpora[0], order_of(config, list(map(len, corpora)))
    numbers: dict[str, float] = {
        "tokens": len(corpus),
        "windows": order.windows,
        "held_out_windows": order.held_out_windows,
    }
    start = int(order.train(0).flat[0]) * sequence
    window = corpus[start : start + sequence]
    tokenizer = tokenizer_of(options)
    if tokenizer is None and window.dtype == np.uint8:
        text = window.tobytes().decode(errors="replace")
    else:
        text = _decoded(window.tolist(), tokenizer)
    microbatches = [(train.micro_batch, sequence)] * (train.global_batch // train.micro_batch)
    held_out = held_out_text(config.data.sources[-1], order.held_out_windows, "sequences")
    return DataView(numbers, {}, microbatches, [[(text, True)]], [], held_out)
