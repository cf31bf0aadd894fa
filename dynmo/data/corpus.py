"""A corpus is one array of bytes, and a byte is a token. `tokenizer.py` and `token_file.py` have
other tokens.

"stdlib" is the standard library of the running Python, so every machine has some megabytes of text.
"file:PATH" is any file. It is read a window at a time, so it may be larger than memory.
"""

from __future__ import annotations

import os
import stat
import sysconfig
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dynmo.errors import ConfigError

VOCAB = 256  # a token is a byte
STDLIB_LIMIT = 16 * 2**20
SEPARATOR = b"\0"  # between files: no source text holds it

# Folders that are installed beside the library, or hold no prose. `_MACHINE` files describe this
# machine rather than this Python.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
_MACHINE = ("config-", "_sysconfigdata", "sitecustomize", "usercustomize")


class FileCorpus:
    """The bytes of a file. A slice is read on demand.

    The file is not mapped, because a mapped file that is cut off ends the process with SIGBUS.
    """

    def __init__(self, path: Path, kind: str = "file") -> None:
        """Raises OSError if the file cannot be opened."""
        self._named = _named(kind, path)
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        self._length = os.fstat(self._file).st_size

    def __len__(self) -> int:
        """The bytes that the file had when it was opened."""
        return self._length

    def __getitem__(self, part: slice) -> NDArray[np.uint8]:
        """Raises ConfigError if the file has become shorter, or cannot be read any more."""
        start, stop, _ = part.indices(self._length)
        text = bytearray()
        try:
            while len(text) < stop - start:
                at = start + len(text)
                piece = os.pread(self._file, stop - at, at)
                if not piece:
                    now = os.fstat(self._file).st_size
                    sizes = f"it had {self._length} bytes when it was opened, and has {now} now"
                    raise ConfigError(f"{self._named} has been cut off: {sizes}")
                text += piece
        except OSError as error:
            raise ConfigError(f"{self._named} cannot be read ({error.strerror})") from None
        return np.frombuffer(text, dtype=np.uint8)


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
    return file(Path(path))


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


def _named(kind: str, path: Path) -> str:
    return f'data.source = "{kind}:{path}":'


def file(path: Path, kind: str = "file") -> FileCorpus:
    """Opens a file. `kind` is how `data.source` names it."""
    problem = None
    try:
        info = path.stat()
        if not stat.S_ISREG(info.st_mode):  # a folder, or a pipe that would block
            problem = "not a regular file"
        elif not info.st_size:
            problem = "the file is empty"
        else:
            return FileCorpus(path, kind)
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    wanted = "text" if kind == "file" else kind
    raise ConfigError(f"{_named(kind, path)} {problem}; give a file of {wanted}")
