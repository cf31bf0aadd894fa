"""Tokenises the data of a run ahead, into a file that other runs read."""

from __future__ import annotations

import json
import logging
import os
import threading
import tomllib
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dynmo.config import Config, parse
from dynmo.data.batches import SampleBatches
from dynmo.data.corpus import DTYPES, VOCAB
from dynmo.data.records import BrokenSampleError, load_module, open_records
from dynmo.data.samples import Sample
from dynmo.errors import ConfigError
from dynmo.models.model import Model
from dynmo.train.data import open_batches, open_text
from dynmo.train.setup import model_of

# A Parquet file is read a group of rows at a time, and shuffled samples come from all groups.
_GROUP = 128
_TOKENS = 1 << 20

Listener = Callable[[int, int], None]
"""Called with how much is done, and how much there is."""


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
    """
    model = model_of(config)
    if config.data.has_samples:
        return _write_samples(config, model, out, workers, listen)
    return _write_text(config, model, out, listen)


@contextmanager
def _whole(out: Path) -> Generator[Path]:
    """Gives a name to write to. The file gets its own name at the end, or goes."""
    partial = out.with_name(f"{out.name}.tmp")
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
    Path(f"{out}.json").write_text(json.dumps({"dtype": dtype, "vocab": vocab}) + "\n")
    return Tokenised(f"tokens:{out}", None, len(corpus))


# -- samples ---------------------------------------------------------------------------------------


class _Encoded(NamedTuple):
    """Samples of a range of numbers, and the faults of those that are broken."""

    samples: list[Sample]
    broken: list[str]


_batches: SampleBatches | None = None


def _open(text: str, partial: Path) -> None:
    global _batches  # one for each process
    threading.Thread(target=_end_with_parent, args=(partial,), daemon=True).start()
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
    return _Encoded(samples, broken)


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
    starts = deque(range(0, count, _GROUP))
    running = deque[tuple[int, Future[_Encoded]]]()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are parallel
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
                    stop = min(start + _GROUP, count)
                    running.append((stop, pool.submit(_encode, start, stop)))
                stop, future = running.popleft()
                yield stop, future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
