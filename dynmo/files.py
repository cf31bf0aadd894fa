"""Files that are written whole or not at all, and text of unknown files."""

from __future__ import annotations

import errno
import json
import os
import stat
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

_DEEPEST = 100  # tables or lists of a file within one another


def write_whole(path: Path, text: str, mode: int = 0o666) -> None:
    """Write `text` to `path` without ever leaving a half-written file there.

    The text goes to `path` + `.tmp`, is synced to the disk and renamed.

    Args:
        path: The file to create or to replace.
        text: The new content. Written as UTF-8.
        mode: Permissions of the file. The umask of the process takes away from them.

    Raises:
        OSError: The file cannot be written. The former content of `path` is unchanged.
    """
    partial = path.with_name(path.name + ".tmp")
    try:
        partial.unlink(missing_ok=True)  # an existing file would keep its mode
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Brings the names in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_regular(path: Path) -> None:
    """Raises OSError if a path is no file: a folder, or a pipe that would block."""
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is not a regular file")


def read_text(path: Path) -> str:
    """Reads a file of UTF-8 text, with or without a byte-order mark.

    Raises:
        OSError: It cannot be read, or is no file.
        UnicodeDecodeError: It is no such text.
    """
    check_regular(path)
    return path.read_bytes().decode("utf-8-sig")


def parse_json(text: str | bytes) -> object:
    """Raises ValueError for text that is no JSON, is nested deep, or has a lone surrogate."""
    try:
        return _checked(json.loads(text))
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def parse_toml(text: str) -> dict[str, Any]:
    """Raises ValueError for text that is no TOML, or is nested deep."""
    parts = 0  # of a key with dots, on which tomllib spends the square of their number
    for part in text.split("."):
        parts = parts + 1 if part.strip() and "\n" not in part else 0
        if parts > _DEEPEST:
            raise ValueError("it is nested too deep")
    try:
        return cast("dict[str, Any]", _checked(tomllib.loads(text)))
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _checked(whole: object) -> object:
    """Raises ValueError for values that later code could not walk through, or print."""
    level = [whole]
    for _ in range(_DEEPEST):
        below = list[object]()
        for value in level:
            if isinstance(value, dict):
                below += [*value, *cast("dict[str, object]", value).values()]
            elif isinstance(value, list):
                below += cast("list[object]", value)
            elif isinstance(value, str) and not value.isascii():
                value.encode()
        if not below:
            return whole
        level = below
    raise ValueError("it is nested too deep")


class LineLog:
    """Appends lines to a file. A torn last line, which an earlier process left, is dropped.

    Each line is on disk at once, so that a run can be watched.

    Raises:
        OSError: The file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        if path.exists():
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
        # Without a buffer: on a full disk, `close` would try to write its content again.
        self._file = path.open("ab", buffering=0)

    @property
    def size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def truncate(self, size: int) -> None:
        os.truncate(self._path, size)

    def write(self, line: str) -> None:
        """Adds a line, or raises OSError and adds nothing."""
        size, rest = self.size, f"{line}\n".encode()
        if not self._path.exists():
            raise OSError(errno.ENOENT, "it has been removed")
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            with suppress(OSError):
                self.truncate(size)
            raise

    def close(self) -> None:
        self._file.close()
