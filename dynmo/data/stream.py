"""Records that come in order, such as those of a streamed dataset, shuffled in blocks.

A stream is read pass after pass. The first records of each pass are held out. The others are
numbered through all passes, and the records of each block are shuffled:

    pass      |--held out--|-----------------------------|--held out--|------ ..
    numbers    0 ..            block 0    |   block 1    |              block 1 | block 2 ..

The present block is in memory, and the next as far as it is read. A stream that begins in the
middle goes on from a position. Without one it reads from the beginning. A position knows the next
records, so a wrong `state_dict()` is found. The stream is then read from the beginning, too.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, cast

import numpy as np

from dynmo.data.order import Numbers, permutation
from dynmo.data.records import (
    Record,
    Source,
    checked_record,
    digest_of,
    load_rows,
)
from dynmo.errors import ConfigError
from dynmo.options import find_own

_logger = logging.getLogger(__name__)

HELD_OUT = 128
_POSITIONS = 16  # as many blocks as a run reads ahead, and more
_DIGESTS = 8  # records that a position knows


class Position(NamedTuple):
    """Where a stream goes on.

    Attributes:
        number: Number of the next record.
        passes: Passes that are over.
        item: Items of the present pass that are over.
        state: `state_dict()` of the rows, as JSON. None if they have none.
        digests: Those of the next records, as far as they are known.
    """

    number: int
    passes: int
    item: int
    state: Any
    digests: Sequence[str] = ()


class Stream:
    """The records of a stream by number, in the shuffled order.

    A number that is far behind the last one is read again from the beginning.

    Args:
        name: The source, for messages.
        rows: Returns the items of a pass. They may have `state_dict()` and `load_state_dict()`,
            which spare reading from the beginning.
        block: Records that are shuffled together.
        seed: Seed of the order.
        position: Where to go on.
        held_out: The first records of a pass that are held out.

    Raises:
        ConfigError: The stream cannot be read, or has too few records.
    """

    def __init__(
        self,
        name: str,
        rows: Callable[[], Iterable[Any]],
        block: int,
        seed: int,
        position: Position | None = None,
        held_out: int = HELD_OUT,
    ) -> None:
        self._name, self._rows, self._block, self._seed = name, rows, block, seed
        self.held_out = held_out
        self._passes = _Passes(name, rows, Position(0, 0, 0, None), held_out)
        self._held_out = [self._passes.next() for _ in range(self.held_out)]
        self._read: dict[int, tuple[Any, str]] = {}
        self._first = Position(self.held_out, 0, self.held_out, None)
        self._positions: tuple[Position, ...] = ()  # replaced, because another thread may read it
        self._begun, self._digests = self._first, list[str]()  # of the newest block
        self._end = self.held_out  # number of the next record that is read
        self._order: tuple[int, Numbers] = -1, np.arange(0)
        if position is not None:
            self._go_on(position)

    def __len__(self) -> int:
        """The first records, which are looked at. A stream has no end."""
        return HELD_OUT

    def __getitem__(self, number: int) -> Record:
        return checked_record(*self._find(number))

    def place(self, number: int) -> str:
        return self._find(number)[1]

    def position(self, number: int) -> Position:
        """Returns where a stream goes on whose next record has this number."""
        start = number - (number - self.held_out) % self._block
        known = (*self._positions, self._first)
        return max((p for p in known if p.number <= start), key=lambda p: p.number)

    def _find(self, number: int) -> tuple[Any, str]:
        if number < self.held_out:
            return self._held_out[number]
        block, place = divmod(number - self.held_out, self._block)
        start = self.held_out + block * self._block
        if start < self._end and start not in self._read:
            self._go_on(self.position(number))
        for past in [each for each in self._read if each < start]:
            del self._read[past]
        # This is the whole block, and each record that is used reads one of the next.
        while self._end < number + self._block:
            if (self._end - self.held_out) % self._block == 0:
                self._begun, self._digests = self._passes.position(self._end), []
            item = self._passes.next()
            if self._end >= start:
                self._read[self._end] = item
            self._end += 1
            if len(self._digests) < min(_DIGESTS, self._block):
                self._digests.append(digest_of(item[0]))
                if len(self._digests) == min(_DIGESTS, self._block):
                    position = self._begun._replace(digests=self._digests)
                    self._positions = (*self._positions, position)[-_POSITIONS:]
        if self._order[0] != block:
            self._order = block, permutation(self._block, self._seed, block)
        return self._read[start + int(self._order[1][place])]

    def _go_on(self, position: Position) -> None:
        items = None
        if position.state is not None:
            with suppress(ConfigError):  # a wrong state may be behind the last record
                items = self._items(position)
            if items is None:
                _logger.warning(
                    f"{self._name}: its state_dict() goes on with other records, so the stream is "
                    "read from the beginning"
                )
        if items is None:
            items = self._items(position._replace(state=None))
        if items is None:
            raise ConfigError(
                f'data.source = "{self._name}": gives other records than before the resume; give '
                "the same ones in the same order, which data.block shuffles, or start anew"
            )
        self._read = dict(enumerate(items, position.number))
        self._positions = (position,)
        self._end = position.number + len(items)
        self._digests = [""] * _DIGESTS  # a block that began before is not known

    def _items(self, position: Position) -> list[tuple[Any, str]] | None:
        """Returns the first items from a position on. None if they are not those that it knows."""
        self._passes = _Passes(self._name, self._rows, position, self.held_out)
        items = [self._passes.next() for _ in position.digests]
        digests = [digest_of(item) for item, _ in items]
        return items if digests == list(position.digests) else None


def open_stream(
    source: Source,
    block: int,
    seed: int,
    position: Position | None = None,
    held_out: int = HELD_OUT,
) -> Stream:
    """Opens "hf:NAME", "python:module:function", or what a function returns for each pass.

    The other arguments are those of `Stream`.

    Raises:
        ConfigError: The source is no stream, or cannot be read.
    """
    if callable(source):
        name, rows = "the stream", source
    elif not isinstance(source, str):
        raise ConfigError(
            f"a stream needs a function that returns the records of a pass, not a "
            f"{type(source).__name__}; leave out streaming for a sequence"
        )
    elif source.startswith("hf:"):
        name, rows = source, partial(load_rows, source.removeprefix("hf:"), streaming=True)
    elif source.startswith("python:"):
        name, rows = source, find_own("data.source", source)
    else:
        raise ConfigError(
            f'data.source = "{source}" is read by number, a record at a time; leave out '
            "data.streaming, which is for hf: and python:"
        )
    return Stream(name, rows, block, seed, position, held_out)


class _Passes:
    """Reads items, pass after pass, without those that later passes hold out."""

    def __init__(
        self, name: str, rows: Callable[[], Iterable[Any]], at: Position, held_out: int
    ) -> None:
        self._held_out = held_out
        self._name, self._function, self._over, self._item = name, rows, at.passes, at.item
        self._rows = self._make()
        if at.state is not None and hasattr(self._rows, "load_state_dict"):
            cast(Any, self._rows).load_state_dict(at.state)
            self._items = iter(self._rows)
        else:
            self._items = islice(self._rows, at.item, None)

    def _make(self) -> Iterable[Any]:
        rows = self._function()
        if not hasattr(rows, "__iter__"):
            raise ConfigError(
                f'data.source = "{self._name}": returned a {type(rows).__name__}; with '
                "data.streaming it must return records to iterate over"
            )
        buffer = _shuffle_buffer(getattr(rows, "_ex_iterable", None))  # of datasets
        if buffer > 1:
            raise ConfigError(
                f'data.source = "{self._name}": a resume loses the records in the buffer of '
                f"shuffle(buffer_size={buffer}); leave it out, and set data.block = {buffer}, "
                "which shuffles as many"
            )
        return rows

    def position(self, number: int) -> Position:
        state = None
        if hasattr(self._rows, "state_dict"):
            state = json.loads(json.dumps(cast(Any, self._rows).state_dict()))
        return Position(number, self._over, self._item, state)

    def next(self) -> tuple[Any, str]:
        """Returns an item, and where it is."""
        item = self._take()
        if item is None:
            if self._item <= self._held_out:
                raise ConfigError(
                    f'data.source = "{self._name}": has {self._item} records, and a stream needs '
                    f"more than the {self._held_out} that are held out; leave out data.streaming"
                )
            self._over, self._item, self._rows = self._over + 1, 0, self._make()
            self._items = iter(self._rows)
            for _ in range(self._held_out):
                self._take()
            return self.next()
        return item[0], f"{self._name}, item {self._item - 1} of pass {self._over + 1}"

    def _take(self) -> tuple[Any] | None:
        try:
            item = next(self._items)
        except StopIteration:
            return None
        except Exception as error:  # what the user's code or a library raises
            raise ConfigError(
                f"{self._name}, item {self._item} of pass {self._over + 1}: raised "
                f"{type(error).__name__}: {error}"
            ) from error
        self._item += 1
        return (item,)


def _shuffle_buffer(part: Any) -> int:
    """Returns the records that a part of a dataset shuffles in a buffer. 0 if none."""
    if part is None:
        return 0
    own = part.buffer_size if type(part).__name__ == "BufferShuffledExamplesIterable" else 0
    parts = [getattr(part, "ex_iterable", None), *getattr(part, "ex_iterables", ())]
    return max(own, *map(_shuffle_buffer, parts))
