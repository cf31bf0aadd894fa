"""Files that are replaced whole or not at all."""

from __future__ import annotations

import os
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
