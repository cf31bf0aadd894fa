"""Files that are written whole or not at all."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path


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
