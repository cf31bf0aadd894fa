"""A disk that is full, for code of this process.

It raises the error of the operating system, without a disk.
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """No file of this process may grow beyond `size` bytes.

    Writing more raises OSError.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def full_at(number: int) -> Iterator[list[int]]:
    """The `number`-th file that is synced no longer fits the disk.

    Yields what was synced.
    """
    synced: list[int] = []
    fsync = os.fsync

    def full(file: int) -> None:
        synced.append(file)
        if len(synced) == number + 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(file)

    with mock.patch("os.fsync", full):
        yield synced
