"""Records: one for each sample, read by number.

    jsonl:PATH      a JSON object on each line
    parquet:PATH    a row
    hf:NAME         an item of a dataset of Hugging Face, or of a folder of `save_to_disk`
    python:module:function    an item of the sequence that a function of one's own returns

A file is not held in memory, so it may be larger. What a record means is said in `samples.py`.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from dynmo.data.corpus import FileCorpus
from dynmo.errors import ConfigError, not_installed, one_line
from dynmo.files import check_regular
from dynmo.options import find_own

Record = Mapping[str, Any]
_NESTED = ("messages", "conversations", "prompt", "completion", "tools")
Source = str | Sequence[Record] | Callable[[], Iterable[Record]]


class BrokenSampleError(ConfigError):
    """A record that is no sample. The message says which."""


class Records(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Record: ...

    def place(self, number: int) -> str:
        """Says where a record is."""
        ...


class WithHeldOut:
    """Records to train on, and others to evaluate on. The latter have the numbers -1, -2, .."""

    def __init__(self, records: Records, held_out: Records) -> None:
        self._records, self.held_out = records, held_out

    def __len__(self) -> int:
        """The records to train on."""
        return len(self._records)

    def __getitem__(self, number: int) -> Record:
        return self.held_out[-1 - number] if number < 0 else self._records[number]

    def place(self, number: int) -> str:
        if number < 0:
            return self.held_out.place(-1 - number)
        return self._records.place(number)


def open_records(source: Source, key: str = "data.source") -> Records:
    """Opens "jsonl:PATH", "parquet:PATH", "hf:NAME", "python:module:function" or a sequence.

    Args:
        source: What to open.
        key: The option that names it, for messages.

    Raises:
        ConfigError: The source cannot be read, or has no records.
    """
    try:
        if isinstance(source, str):
            kind, _, name = source.partition(":")
            if kind not in KINDS or not name:
                raise ConfigError(
                    f'{key} = "{source}": samples come from jsonl:PATH, parquet:PATH, hf:NAME or '
                    "python:module:function"
                )
            records = KINDS[kind](name)
        elif callable(source):
            raise ConfigError(
                "the source is a function; with streaming it is called for the records of each "
                "pass, and without it a sequence is needed"
            )
        elif isinstance(source, Mapping) or not _is_sequence(source):
            raise ConfigError(
                f"{key} is a {type(source).__name__}; give a sequence of records, such as a list "
                "or one split of a dataset"
            )
        else:
            source, records = "the sequence", OwnRecords("the sequence", source)
    except OSError as error:
        told = error.strerror or one_line(str(error))
        raise ConfigError(f'{key} = "{source}": cannot be read ({told})') from None
    if not len(records):
        raise ConfigError(f'{key} = "{source}": there are no records in it')
    return records


def digest_of(record: object) -> str:
    """Returns a short digest of the values of a record that JSON has, or that are arrays."""
    try:
        text = json.dumps(record, default=_plain, skipkeys=True)
    except (ValueError, RecursionError):  # it holds itself, or is very deep
        text = type(record).__name__
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else type(value).__name__


def checked_record(item: object, place: str) -> Record:
    """Returns a record without the keys of messages and tools that have no value.

    Arrow gives each row the keys of all rows. A chat template would write them as null.

    Raises:
        BrokenSampleError: The item is no dictionary.
    """
    if not isinstance(item, Mapping):
        raise BrokenSampleError(f"{place}: a {type(item).__name__}, not a dictionary")
    record = cast(Record, item)
    kinds = (list, Mapping)
    nested = {key: _present(record[key]) for key in _NESTED if isinstance(record.get(key), kinds)}
    return {**record, **nested} if nested else record


def _present(value: Any) -> Any:
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value).items()
        return {key: _present(each) for key, each in items if each is not None}
    return [_present(each) for each in cast("list[Any]", value)] if type(value) is list else value


def load_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise ConfigError(not_installed(package)) from None


def _file_of(name: str) -> Path:
    path = Path(name)
    try:
        check_regular(path)
    except FileNotFoundError as error:
        if path.is_absolute():
            raise
        hint = "the path is relative to the folder where dynmo starts"
        told = f"{error.strerror} in {Path.cwd()}; {hint}"
        raise FileNotFoundError(error.errno, told) from None
    return path


class JsonLines:
    """A file with a JSON object on each line. Empty lines are no records."""

    def __init__(self, name: str) -> None:
        self._path = _file_of(name)
        self._file = FileCorpus(self._path, "jsonl")
        starts, lines, at = [0], list[int](), 0
        with self._path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    starts.append(at)
                    lines.append(number)
                at += len(line)
        # Where each record begins, and the number of its line.
        self._starts = np.array([*starts[1:], at], np.int64)
        self._lines = np.array(lines, np.int64)

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, number: int) -> Record:
        start, stop = self._starts[number : number + 2].tolist()
        line = self._file[start:stop].tobytes()
        try:
            # Lines that follow a record's own are empty.
            record = cast(object, json.loads(line.rstrip()))
        except ValueError as error:
            why = str(error)
            if isinstance(error, json.JSONDecodeError):
                why = f"{error.msg}: column {error.colno}"
            raise BrokenSampleError(f"{self.place(number)}: not a line of JSON ({why})") from None
        except RecursionError:
            raise BrokenSampleError(f"{self.place(number)}: its JSON is nested too deep") from None
        if not isinstance(record, dict):
            kind = type(record).__name__
            raise BrokenSampleError(f"{self.place(number)}: a {kind}, not a JSON object")
        return cast(Record, record)

    def place(self, number: int) -> str:
        return f"{self._path}:{self._lines[number]}"


def load_rows(name: str, streaming: bool = False) -> Any:
    """Loads a dataset of Hugging Face.

    Args:
        name: May end with the split: `NAME[train]`. Without one the split is "train".
        streaming: Whether to get an IterableDataset, which is read in order.
    """
    datasets = load_module("datasets")
    path, _, split = name.removesuffix("]").partition("[")
    with _loading(f'data.source = "hf:{name}"'):
        if Path(path).is_dir() and (Path(path) / "state.json").is_file():
            rows = datasets.load_from_disk(path)
            return rows.to_iterable_dataset() if streaming else rows
        return datasets.load_dataset(path, split=split or "train", streaming=streaming)


def _parquet(name: str) -> OwnRecords:
    """Returns the rows of a file. `datasets` keeps them in its cache, to read them in any order."""
    _file_of(name)
    datasets = load_module("datasets")
    datasets.disable_progress_bars()
    with _loading(name):
        return OwnRecords(name, datasets.Dataset.from_parquet(name))


@contextmanager
def _loading(where: str) -> Generator[None]:
    try:
        yield
    except Exception as error:  # datasets raises what it wants for files that are damaged
        cause = error.__cause__ or error
        said = one_line(str(cause)) or type(cause).__name__
        raise ConfigError(f"{where}: cannot be loaded: {said}") from None


class OwnRecords:
    """The items of a sequence of one's own.

    Args:
        name: What messages call it.
    """

    def __init__(self, name: str, rows: Any) -> None:
        self._name, self._rows = name, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Record:
        try:
            record = self._rows[number]
        except Exception as error:  # anything that the user's code raises
            said = f"{type(error).__name__}: {error}"
            raise BrokenSampleError(f"{self.place(number)}: raised {said}") from error
        return checked_record(record, self.place(number))

    def place(self, number: int) -> str:
        return f"{self._name}, item {number}"


def _is_sequence(rows: object) -> bool:
    return hasattr(rows, "__len__") and hasattr(rows, "__getitem__")


def _returned(name: str) -> OwnRecords:
    """Returns the items of the sequence that a function of one's own returns."""
    rows = find_own("data.source", f"python:{name}")()
    if not _is_sequence(rows):
        raise ConfigError(
            f'data.source = "python:{name}": returned a {type(rows).__name__}; it must return '
            "a sequence of records, such as a list or a Dataset with a length, or "
            "data.streaming = true must be set"
        )
    return OwnRecords(name, rows)


KINDS: dict[str, Callable[[str], Records]] = {
    "jsonl": JsonLines,
    "parquet": _parquet,
    "hf": lambda name: OwnRecords(name, load_rows(name)),
    "python": _returned,
}
