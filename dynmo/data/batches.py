"""The batch of a step, as a pure function of (seed, step).

`order.py` decides which sequences or samples a batch has. A batch needs no state in checkpoints,
resumes at any step, and is the same on every rank without communication. The sequences and their
order are the same for any split into microbatches, replicas or stages.

A broken sample is left out of its step, or ends the run. A microbatch that has no other gets a row
of which no label counts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynmo.activity import ACTIVITY
from dynmo.data import IGNORED
from dynmo.data.corpus import Corpus
from dynmo.data.grouping import RowCost, grouped, packed
from dynmo.data.order import Numbers, Order, StreamOrder, windows_in
from dynmo.data.records import BrokenSampleError, Records
from dynmo.data.samples import Encoder, Sample
from dynmo.errors import ConfigError


class Batches:
    """Batches of sequences, in microbatches. The other arguments are those of `Order`.

    Args:
        shifted: Whether the target of a token is the next token. Otherwise it is the token itself,
            as the losses of transformers have it.
        held_out: What is held out: a share of the corpus, or a text of its own.
    """

    def __init__(
        self,
        corpus: Corpus,
        sequence: int,
        global_batch: int,
        micro_batch: int,
        seed: int,
        shuffle: str = "windows",
        shifted: bool = True,
        held_out: float | Corpus | None = None,
    ) -> None:
        self._corpus, self._sequence, self._micro_batch = corpus, sequence, micro_batch
        self._shifted = shifted
        share = held_out if isinstance(held_out, float | int) else None
        self._own = None if isinstance(held_out, float | int) else held_out
        length = None if self._own is None else len(self._own)
        windows = windows_in(sequence, len(corpus), length)
        self._order = Order(windows[0], global_batch, micro_batch, seed, shuffle, share, windows[1])
        self.windows, self.held_out_windows = self._order.windows, self._order.held_out_windows

    def train(self, step: int) -> tuple[Tensor, Tensor]:
        """Return (inputs, targets), int64 [microbatches, micro_batch, sequence].

        They are those of all replicas in order.
        """
        return self._split(self._rows(self._order.train(step), shift=0))

    def held_out(self, index: int) -> tuple[Tensor, Tensor]:
        """Return (inputs, targets) of one microbatch to evaluate on.

        Both are int64 [micro_batch, sequence]. The first window follows the last.
        """
        return self._split(self._rows(self._order.held_out(index), shift=1))

    def _rows(self, windows: NDArray[np.int64], shift: int) -> NDArray[np.int64]:
        length = self._sequence + 1
        rows = np.stack([self._window(each, shift, length) for each in windows.ravel().tolist()])
        return rows.reshape(*windows.shape, length).astype(np.int64)

    def _window(self, number: int, shift: int, length: int) -> NDArray[np.int64]:
        corpus = self._corpus
        if number < 0:
            assert self._own is not None
            corpus, number = self._own, -1 - number
        start = number * self._sequence + shift
        return corpus[start : start + length]

    def _split(self, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        tokens = torch.from_numpy(rows)
        inputs = tokens[..., :-1].contiguous()
        return inputs, tokens[..., 1:].contiguous() if self._shifted else inputs


_logger = logging.getLogger(__name__)

Microbatch = dict[str, Tensor]

_STEPS = 1000  # in which a sample is looked for that is not broken


@dataclass(frozen=True)
class Padding:
    """How many tokens microbatches have, and how many of them are padding."""

    tokens: int
    padded: int


class SampleBatches:
    """Batches of samples.

    Args:
        batching: "rows" has as many samples in each microbatch. "grouped" makes microbatches alike
            in cost. "packed" puts several samples in a row, and makes microbatches alike in cost.
        broken: "stop" raises BrokenSampleError. "skip" leaves the sample out, and counts it.
        pad: The id of padding.
        cost: What rows cost, for "grouped" and "packed".

    Attributes:
        skipped: Number of broken samples that were left out.
    """

    def __init__(
        self,
        records: Records,
        encoder: Encoder,
        order: Order | StreamOrder,
        *,
        micro_batch: int,
        batching: Literal["rows", "grouped", "packed"] = "rows",
        broken: Literal["stop", "skip"] = "stop",
        pad: int = 0,
        cost: RowCost | None = None,
    ) -> None:
        self.records, self.encoder, self.order = records, encoder, order
        self._micro_batch, self._batching, self._broken = micro_batch, batching, broken
        self._pad, self._cost = pad, cost or RowCost()
        self.skipped = 0

    def train(self, step: int, part: slice = slice(None)) -> list[Microbatch]:
        """Returns a part of a step's microbatches. The replicas' ones follow one another.

        A step without a sample that is not broken has those of the next such step.
        """
        for each in range(step, step + _STEPS):
            numbers, by_rows = self.order.train(each), self._batching == "rows"
            parts = numbers[part] if by_rows else numbers.reshape(1, -1)
            found = [self._samples(row) for row in parts]
            wanted = 1 if by_rows else len(numbers)
            if any(len(row) < wanted for row in found):
                uncounted = self._uncounted(numbers)
                if uncounted is None:
                    continue
                found = [row + [uncounted] * (wanted - len(row)) for row in found]
            if by_rows:
                return [self._padded(row) for row in found]
            return self._joined(found[0], len(numbers), part)
        last = step + _STEPS - 1
        raise BrokenSampleError(f"all samples of the steps {step} to {last} are broken")

    def _joined(self, samples: Sequence[Sample], count: int, part: slice) -> list[Microbatch]:
        lengths = [len(sample.ids) for sample in samples]
        longest = self.encoder.longest
        most_tokens = self._micro_batch * longest
        if self._batching == "packed":
            return [
                self._packed([[samples[at] for at in row] for row in each])
                for each in packed(lengths, count, most_tokens, longest, self._cost)[part]
            ]
        groups = grouped(lengths, count, most_tokens, self._cost)
        return [self._padded([samples[at] for at in group]) for group in groups[part]]

    def held_out(self, index: int) -> Microbatch:
        """Returns a microbatch to evaluate on."""
        samples = self._samples(self.order.held_out(index))
        if not samples:
            most = index + self.order.held_out_windows
            every = map(self.order.held_out, range(index, most))
            uncounted = next((found for found in map(self._uncounted, every) if found), None)
            if uncounted is None:
                raise BrokenSampleError("all samples that are held out are broken")
            samples = [uncounted]
        return self._padded(samples)

    def _uncounted(self, numbers: Numbers) -> Sample | None:
        """Returns the start of the first sample that is not broken, of which no label counts.

        It stands in a microbatch that has no other. None if all samples are broken.
        """
        for number in numbers.ravel().tolist():
            with suppress(BrokenSampleError):
                return Sample(self.encoded(number).ids[:2], [IGNORED] * 2)
        return None

    def encoded(self, number: int) -> Sample:
        """Returns a sample, or raises BrokenSampleError."""
        return self.encoder.encode(self.records[number], self.records.place(number))

    def _samples(self, numbers: Numbers) -> list[Sample]:
        samples: list[Sample] = []
        for number in numbers.tolist():
            ACTIVITY.ticks += 1
            try:
                samples.append(self.encoded(number))
            except BrokenSampleError as error:
                if self._broken == "stop":
                    raise BrokenSampleError(
                        f'{error}; correct it, or leave such samples out (data.broken = "skip")'
                    ) from error
                self.skipped += 1
                _logger.warning(f"sample {number} is left out: {error}")
        return samples

    def _padded(self, samples: Sequence[Sample]) -> Microbatch:
        longest = max(len(sample.ids) for sample in samples)
        shape = len(samples), longest
        ids, labels = torch.full(shape, self._pad), torch.full(shape, IGNORED)
        mask = torch.zeros(shape, dtype=torch.int64)
        for row, sample in enumerate(samples):
            length = len(sample.ids)
            ids[row, :length] = torch.tensor(sample.ids)
            labels[row, :length] = torch.tensor(sample.labels)
            mask[row, :length] = 1
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    def _packed(self, rows: Sequence[Sequence[Sample]]) -> Microbatch:
        """Positions begin anew with each sample. Each token of padding has position 0.

        transformers keeps samples apart where positions begin anew, if there is no mask.
        """
        shape = len(rows), max(sum(len(sample.ids) for sample in row) for row in rows)
        ids, labels = torch.full(shape, self._pad), torch.full(shape, IGNORED)
        positions = torch.zeros(shape, dtype=torch.int64)
        for row, samples in enumerate(rows):
            start = 0
            for sample in samples:
                stop = start + len(sample.ids)
                ids[row, start:stop] = torch.tensor(sample.ids)
                # The token before belongs to another sample.
                labels[row, start + 1 : stop] = torch.tensor(sample.labels[1:])
                positions[row, start:stop] = torch.arange(len(sample.ids))
                start = stop
        return {"input_ids": ids, "position_ids": positions, "labels": labels}


def padding_of(microbatches: Sequence[Microbatch]) -> Padding:
    tokens = sum(each["input_ids"].numel() for each in microbatches)
    return Padding(tokens, tokens - sum(map(_sample_tokens, microbatches)))


def _sample_tokens(microbatch: Microbatch) -> int:
    """Returns how many tokens are not padding."""
    if "attention_mask" in microbatch:
        return int(microbatch["attention_mask"].sum())
    # Padding has position 0. A sample has two tokens at least, so one in position 1.
    positions = microbatch["position_ids"]
    return int((positions > 0).sum() + (positions == 1).sum())


def check_first(records: Records, encoder: Encoder, broken: Literal["stop", "skip"]) -> None:
    """Raises ConfigError if the first record is broken, or its kind cannot be encoded.

    With "skip" the first record is the first one that is not broken.
    """
    first = None
    for number in range(len(records)):
        try:
            record = records[number]
            encoder.check(record)
            encoder.encode(record, records.place(number))
        except BrokenSampleError as error:
            first = first or str(error)
            if broken == "stop":
                break
        else:
            return
    assert first is not None, "there are records"
    many = "" if broken == "stop" else f"all {len(records)} records are broken; the first one: "
    raise ConfigError(f"{many}{first}")


T = TypeVar("T")


class Ahead(Generic[T]):
    """Calls a function with 0, 1, 2, .. ahead of need.

    Args:
        make: Makes what belongs to a number.
        depth: How many are made ahead.

    Attributes:
        waited: Seconds that `take` waited in all.
    """

    def __init__(self, make: Callable[[int], T], depth: int = 3) -> None:
        self._make, self._depth, self.waited = make, depth, 0.0
        self._pool = ThreadPoolExecutor(1, "dynmo-data")
        self._made: dict[int, Future[T]] = {}

    def take(self, number: int) -> T:
        """Returns what belongs to a number. Raises what `make` has raised for it."""
        for ahead in range(number, number + self._depth + 1):
            if ahead not in self._made:
                self._made[ahead] = self._pool.submit(self._make, ahead)
        for past in [each for each in self._made if each < number]:
            self._made.pop(past).cancel()
        start = time.perf_counter()
        try:
            return self._made[number].result()
        finally:
            self.waited += time.perf_counter() - start

    def error(self, number: int) -> BaseException | None:
        """Waits for a number that is made ahead. Returns what `make` has raised for it."""
        start = time.perf_counter()
        error = self._made[number].exception()
        self.waited += time.perf_counter() - start
        return error

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
