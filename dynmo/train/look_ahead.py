"""What `dynmo data` does: it shows the data of a run, and tokenises it ahead into a file."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import tomllib
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import groupby
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from dynmo.config import Config, parse, with_options
from dynmo.data import IGNORED
from dynmo.data.batches import SampleBatches, padding_of
from dynmo.data.corpus import DTYPES, VOCAB
from dynmo.data.order import held_out_text
from dynmo.data.records import BrokenSampleError, WithHeldOut, load_module, open_records
from dynmo.data.samples import Sample
from dynmo.errors import ConfigError
from dynmo.files import write_whole
from dynmo.models.model import Model
from dynmo.signals import STOP_SIGNALS, interrupted_by_signals, signals_held_back
from dynmo.train.data import open_batches, open_text, order_of, tokenizer_of
from dynmo.train.setup import model_of

_MOST = 10_000  # samples that are encoded for their lengths; the others are only parsed
_GROUP = 1000  # samples after which progress is told
_PADDED = 1000  # samples of the first steps whose padding is counted
_SHOWN = 2
_NAMED = 20  # broken samples that are named


Listener = Callable[[int, int], None]
"""Called with how much is done, and how much there is."""


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


def view_of(config: Config, listen: Listener) -> DataView:
    """Looks at the data of a run.

    Args:
        config: The run.
        listen: Called with how many samples are read, and how many there are.

    Raises:
        ConfigError: The data cannot be read.
    """
    return _samples(config, listen) if config.data.has_samples else _text(config)


def _samples(config: Config, listen: Listener) -> DataView:
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
        "padding": _padding(batches, config.train.steps),
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


def _padding(batches: SampleBatches, steps: int) -> float:
    """Returns the share of the tokens of the first steps that are padding."""
    steps = min(steps, max(1, _PADDED // batches.order.train(0).size))
    counts = padding_of([each for step in range(steps) for each in batches.train(step)])
    return counts.padded / counts.tokens


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


# A Parquet file is read a group of rows at a time, and shuffled samples come from all groups.
_ROWS = 128
_TOKENS = 1 << 20


@dataclass(frozen=True)
class Tokenised:
    """What was written.

    Attributes:
        source: The `data.source` that reads it.
        samples: Number of samples. None for text.
        tokens: Number of tokens.
        skipped: Number of broken samples that were left out.
    """

    source: str
    samples: int | None
    tokens: int
    skipped: int = 0


def tokenise(config: Config, out: Path, workers: int, listen: Listener) -> Tokenised:
    """Writes the tokens of a run's data.

    Samples become a Parquet file of `input_ids` and `labels`. Text becomes a file of numbers, with
    OUT.json beside it.

    Args:
        config: The run.
        out: The file. It appears once it is whole.
        workers: Number of processes that encode samples.
        listen: Called as the work goes on.

    Raises:
        ConfigError: The data cannot be read, or a sample is broken and `data.broken` is "stop".
        OSError: The file cannot be written.
        Interrupted: A signal came before the file was whole.
    """
    model = model_of(config)
    if config.data.has_samples:
        return _write_samples(config, model, out, workers, listen)
    return _write_text(config, model, out, listen)


@contextmanager
def _whole(out: Path) -> Generator[Path]:
    """Gives a name to write to. The file gets its own name at the end, or goes."""
    partial = out.with_name(f"{out.name}.tmp")
    with interrupted_by_signals(f"interrupted; {out} was not written"):
        try:
            yield partial
            partial.replace(out)
        finally:
            partial.unlink(missing_ok=True)


# -- text ------------------------------------------------------------------------------------------


def _write_text(config: Config, model: Model, out: Path, listen: Listener) -> Tokenised:
    options = model.options or config.model
    corpus = open_text(config.data.source, options)
    is_bytes = corpus[:1].dtype == np.uint8
    vocab = VOCAB if is_bytes else options.vocab
    dtype = next(name for name in DTYPES if vocab - 1 <= np.iinfo(name).max)
    with _whole(out) as partial, partial.open("wb") as file:
        for start in range(0, len(corpus), _TOKENS):
            piece = corpus[start : start + _TOKENS]
            file.write(piece.astype(np.dtype(dtype).newbyteorder("<")).tobytes())
            listen(min(start + _TOKENS, len(corpus)), len(corpus))
    write_whole(Path(f"{out}.json"), json.dumps({"dtype": dtype, "vocab": vocab}) + "\n")
    return Tokenised(f"tokens:{out}", None, len(corpus))


# -- samples ---------------------------------------------------------------------------------------


_Encoded = tuple[list[Sample], list[str]]
"""Samples of a range of numbers, and the faults of those that are broken."""


_batches: SampleBatches | None = None


def _open(text: str, partial: Path) -> None:
    global _batches  # one for each process
    threading.Thread(target=_end_with_parent, args=(partial,), daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    logging.disable(logging.WARNING)  # the first process has said it
    config = parse(tomllib.loads(text))
    _batches = open_batches(config, model_of(config))


def _end_with_parent(partial: Path) -> None:
    """Ends this process once its parent is killed, which can remove no file."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    partial.unlink(missing_ok=True)
    os._exit(1)


def _encode(start: int, stop: int) -> _Encoded:
    assert _batches is not None
    samples, broken = list[Sample](), list[str]()
    for number in range(start, stop):
        try:
            samples.append(_batches.encoded(number))
        except BrokenSampleError as error:
            broken.append(str(error))
    return samples, broken


def _write_samples(
    config: Config, model: Model, out: Path, workers: int, listen: Listener
) -> Tokenised:
    if config.data.streaming:
        raise ConfigError(
            "data.streaming = true: a stream has no end to tokenise; leave it out, so that the "
            "records are read by number"
        )
    arrow, parquet = load_module("pyarrow"), load_module("pyarrow.parquet")
    open_batches(config, model)  # raises what is wrong before the processes start
    count = len(open_records(config.data.source))
    numbers: Any = arrow.list_(arrow.int32())
    schema = arrow.schema([("input_ids", numbers), ("labels", numbers)])
    written = tokens = skipped = 0
    with _whole(out) as partial, parquet.ParquetWriter(partial, schema) as file:
        for stop, (samples, broken) in _all_encoded(config, count, workers, partial):
            if broken and config.data.broken == "stop":
                raise ConfigError(f'{broken[0]}; or leave such samples out (data.broken = "skip")')
            rows = {
                "input_ids": [sample.ids for sample in samples],
                "labels": [sample.labels for sample in samples],
            }
            if samples:
                file.write_table(arrow.table(rows, schema=schema))
            written += len(samples)
            skipped += len(broken)
            tokens += sum(len(sample.ids) for sample in samples)
            listen(stop, count)
    return Tokenised(f"parquet:{out}", written, tokens, skipped)


def _all_encoded(
    config: Config, count: int, workers: int, partial: Path
) -> Iterator[tuple[int, _Encoded]]:
    """Yields encoded ranges in order, each with its end."""
    starts = deque(range(0, count, _ROWS))
    running = deque[tuple[int, Future[_Encoded]]]()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are parallel
    others = {*active_children()}
    with ProcessPoolExecutor(
        workers,
        mp_context=get_context("spawn"),
        initializer=_open,
        initargs=(config.to_toml(), partial),
    ) as pool:
        try:
            while starts or running:
                while starts and len(running) < 4 * workers:
                    start = starts.popleft()
                    stop = min(start + _ROWS, count)
                    # A worker whose start is broken off would end with a traceback.
                    with signals_held_back():
                        running.append((stop, pool.submit(_encode, start, stop)))
                stop, future = running.popleft()
                yield stop, future.result()
        except BaseException:  # nobody wants what the workers are still encoding
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in {*active_children()} - others:
                worker.kill()  # it may not hear other signals yet
            raise
