"""Text and tokens on disk.

A corpus is one array of bytes, and a byte is a token. "stdlib" is the standard library of the
running Python, so every machine has some megabytes of text. "file:PATH" is any file. It is read a
window at a time, so it may be larger than memory. `tokenizer.py` makes other tokens.

"tokens:PATH" is a file of numbers one after another. PATH.json says how to read them:

    {"dtype": "uint16", "vocab": 32000}

dtype is uint8, uint16, uint32 or int32, little-endian. All tokens are below vocab.
"""

from __future__ import annotations

import os
import re
import sysconfig
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict

from dynmo.cost.input_file import checked, read_json
from dynmo.errors import ConfigError
from dynmo.files import check_regular, parse_json
from dynmo.options import Count, Options

VOCAB = 256  # a token is a byte
STDLIB_LIMIT = 16 * 2**20
SEPARATOR = b"\0"  # between files: no source text holds it

# Folders that are installed beside the library, or hold no prose. `_MACHINE` files describe this
# machine rather than this Python.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
_MACHINE = ("config-", "_sysconfigdata", "sitecustomize", "usercustomize")


class FileCorpus:
    """The numbers of a file, little-endian. A slice is read on demand.

    The file is not mapped, because a mapped file that is cut off ends the process with SIGBUS.

    Args:
        path: The file.
        kind: How `data.source` names it.
        dtype: The type of its numbers.

    Raises:
        ConfigError: The file cannot be read, or has no numbers of this type.
    """

    def __init__(self, path: Path, kind: str = "file", dtype: str = "uint8") -> None:
        self._named = f'data.source = "{kind}:{path}":'
        self._dtype = np.dtype(dtype).newbyteorder("<")
        try:
            check_regular(path)
            self._file = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise ConfigError(f"{self._named} cannot be read ({error.strerror})") from None
        weakref.finalize(self, os.close, self._file)
        self._bytes = os.fstat(self._file).st_size
        if not self._bytes:
            raise ConfigError(f"{self._named} the file is empty")
        if self._bytes % self._dtype.itemsize:
            raise ConfigError(
                f"{self._named} has {self._bytes} bytes, no multiple of the "
                f"{self._dtype.itemsize} of {dtype}; correct dtype in {path}.json"
            )

    def __len__(self) -> int:
        """The numbers that the file had when it was opened."""
        return self._bytes // self._dtype.itemsize

    def __getitem__(self, part: slice) -> NDArray[Any]:
        """Raises ConfigError if the file has become shorter, or cannot be read any more."""
        start, stop, _ = (at * self._dtype.itemsize for at in part.indices(len(self)))
        read = bytearray()
        try:
            while len(read) < stop - start:
                at = start + len(read)
                piece = os.pread(self._file, stop - at, at)
                if not piece:
                    now = os.fstat(self._file).st_size
                    sizes = f"it had {self._bytes} bytes when it was opened, and has {now} now"
                    raise ConfigError(f"{self._named} has been cut off: {sizes}")
                read += piece
        except OSError as error:
            raise ConfigError(f"{self._named} cannot be read ({error.strerror})") from None
        return np.frombuffer(read, self._dtype)


class Corpus(Protocol):
    """Tokens, of which a slice is read at a time."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> NDArray[Any]: ...


def check_vocab(vocab: int) -> None:
    """Raises ConfigError if a model of `vocab` tokens cannot read bytes."""
    if vocab < VOCAB:
        raise ConfigError(
            f"model.vocab = {vocab}: the corpus is bytes, so at least {VOCAB} tokens are needed; "
            f"set it to {VOCAB}"
        )


def open_corpus(source: str) -> Corpus:
    """Return the bytes of "stdlib" or "file:PATH", read-only."""
    if source == "stdlib":
        return stdlib(Path(sysconfig.get_path("stdlib")))
    kind, _, path = source.partition(":")
    if kind != "file":
        raise ConfigError(f'data.source = "{source}": unknown; use "stdlib" or "file:PATH"')
    return FileCorpus(Path(path))


def stdlib(folder: Path, limit: int = STDLIB_LIMIT) -> NDArray[np.uint8]:
    """Return the .py files of a folder, each followed by a separator."""
    text = bytearray()
    for _, path in sorted((path.relative_to(folder).as_posix(), path) for path in _sources(folder)):
        text += path.read_bytes() + SEPARATOR
        if len(text) >= limit:
            break
    if not text:
        raise ConfigError(
            f'data.source = "stdlib": this Python keeps no sources in {folder}; use "file:PATH"'
        )
    return np.frombuffer(bytes(text[:limit]), dtype=np.uint8)


def _sources(folder: Path) -> Iterator[Path]:
    for where, folders, names in os.walk(folder):
        # Changed in place, so that the walk never enters these folders. site-packages may hold far
        # more than the library.
        folders[:] = [
            name
            for name in folders
            if name not in _SKIPPED_FOLDERS and not name.startswith(_MACHINE)
        ]
        yield from (
            Path(where, name)
            for name in names
            if name.endswith(".py") and not name.startswith(_MACHINE)
        )


_EXAMPLE = '{"dtype": "uint16", "vocab": 32000}'


class _Tokens(Options):
    """What PATH.json says. Other programs may write more."""

    model_config = ConfigDict(extra="ignore")

    dtype: Literal["uint8", "uint16", "uint32", "int32"]
    vocab: Count


DTYPES = ("uint8", "uint16", "uint32", "int32")


class TokenFile(FileCorpus):
    """The tokens of a file.

    Args:
        path: The file. PATH.json is read, too.

    Attributes:
        vocab: A number that all tokens are below, as PATH.json says.

    Raises:
        ConfigError: A file is missing, or the two do not fit together.
    """

    def __init__(self, path: Path) -> None:
        where = f'data.source = "tokens:{path}": {path}.json'
        told = read_json(Path(f"{path}.json"), f"{where}, such as {_EXAMPLE}")
        if not isinstance(told, dict):
            raise ConfigError(f"{where} must be like {_EXAMPLE}")
        kind = checked(_Tokens, cast("dict[str, Any]", told), f"{where}: ")
        self.vocab = kind.vocab
        super().__init__(path, "tokens", kind.dtype)

    def __getitem__(self, part: slice) -> NDArray[Any]:
        """Raises ConfigError if the file has become shorter, or has a token outside of `vocab`."""
        tokens = super().__getitem__(part)
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self.vocab:
            wrong = tokens[(tokens < 0) | (tokens >= self.vocab)][0]
            raise ConfigError(
                f"{self._named} has the token {wrong}, and vocab = {self.vocab} in its .json"
            )
        return tokens


_HEAD = 1 << 16
# A file with more zero bytes than this is no text. A text may have some as separators.
_MOST_ZEROS = 0.05

# First bytes of a kind of file. The first that fits counts.
_SIGNATURES = (
    (rb"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19", "a torch file"),
    (rb"\x80[\x02-\x05]", "a Python pickle"),
    (rb"PK\x03\x04(?s:.){26}[\w.-]+/data\.pkl", "a torch file"),
    (rb"PK\x03\x04(?s:.){26}[\w.-]+\.npy", "a numpy archive"),
    (rb"PK\x03\x04", "a zip file"),
    (rb"\x93NUMPY", "a numpy array"),
    (rb"(?s:.){8}\{\s*\"", "a safetensors file"),
    (rb"PAR1", "a parquet file"),
    (rb"ARROW1|\xff\xff\xff\xff(?s:.){4}\x10\x00\x00\x00", "an arrow file"),
    (rb"\x89HDF\r\n", "an HDF5 file"),
    (rb"\x1f\x8b", "a gzip file"),
    (rb"BZh[1-9]1AY", "a bzip2 file"),
    (rb"\xfd7zXZ\x00", "an xz file"),
    (rb"\x28\xb5\x2f\xfd", "a zstd file"),
    (rb"7z\xbc\xaf\x27\x1c", "a 7z file"),
    (rb"(?s:.){257}ustar", "a tar file"),
    (rb"SQLite format 3\x00", "an SQLite database"),
    (rb"%PDF-", "a PDF file"),
    (rb"GGUF", "a GGUF file"),
    (rb"\xff\xfe|\xfe\xff", "text in UTF-16"),
)


def kind_of(path: Path) -> str | None:
    """Name the kind of a file that is no plain text, such as "JSON lines"."""
    with path.open("rb") as file:
        head = file.read(_HEAD)
    for signature, kind in _SIGNATURES:
        if re.match(signature, head):
            return kind
    if head.count(b"\0") > _MOST_ZEROS * len(head):
        return "binary data, such as token numbers"
    # A line that the head cuts off is no record.
    lines = [line for line in head.splitlines() if line.strip()][:2]
    if lines and all(map(_is_record, lines)):
        return "JSON lines"
    is_json = re.match(rb'\s*(\[\s*(\{|\[\s*["\d{])|\{\s*")', b" ".join(lines))
    return "a JSON file" if is_json else None


def _is_record(line: bytes) -> bool:
    try:
        return isinstance(parse_json(line), dict | list)
    except ValueError:  # also text that is not UTF-8
        return False
