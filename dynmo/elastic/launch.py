"""What a launcher and its ranks tell each other.

    in the store     launcher/asked/1   {"start": 2}            rank 0 wants two newcomers
                     launcher/asked/2   {"ranks": [0, 1, 4]}    these processes are the ranks now
                     launcher/asked/3   {"give_back": [2, 3]}   free what these processes had
                     launcher/told/1    {"kind": "released"..   what became of it
    in the folder    entered-4          host, Slurm step        process 4 runs
                     failed-4.json                              why process 4 ended

The launcher owns the store. A process reaches only the folder before it has loaded torch, and when
the store is lost. The environment variable DYNMO_RENDEZVOUS names the folder.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Protocol

from dynmo.elastic.manager import Report
from dynmo.elastic.place import RankPlace

# Errors of a store that is lost, damaged or full.
LOST = (OSError, RuntimeError, ValueError)
# Seconds that another process may hold the lock of the file.
_LOCKED = 1.0
# Bytes of the length before a key or a value in the file.
_LENGTH = 4


class Store(Protocol):
    """What is needed of torch's stores."""

    def check(self, keys: list[str], /) -> bool: ...

    def get(self, key: str, /) -> bytes: ...

    def set(self, key: str, value: str, /) -> None: ...


class FolderStore:
    """The file of torch's `FileStore`, for processes without torch."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "store"
        self._at = 0
        self._values: dict[bytes, bytes] = {}

    def check(self, keys: list[str], /) -> bool:
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._at)
            new, at = file.read(), 0
            while (key := _part(new, at)) and (value := _part(new, at + len(key))):
                self._values[key[_LENGTH:]] = value[_LENGTH:]
                at += len(key) + len(value)
            self._at += at
        return all(_stored(key) in self._values for key in keys)

    def get(self, key: str, /) -> bytes:
        return self._values[_stored(key)]

    def set(self, key: str, value: str, /) -> None:
        """Raises OSError if the file cannot be written, or another process keeps its lock."""
        parts = (_stored(key), value.encode())
        record = b"".join(len(part).to_bytes(_LENGTH, sys.byteorder) + part for part in parts)
        with self._path.open("ab", buffering=0) as file:
            _lock(file)
            size = os.fstat(file.fileno()).st_size
            if file.write(record) < len(record):
                file.truncate(size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _lock(file: IO[bytes]) -> None:
    end = time.monotonic() + _LOCKED
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise
            time.sleep(0.01)


def _stored(key: str) -> bytes:
    return f"/{key}".encode()


def _part(text: bytes, at: int) -> bytes:
    """Returns a key or a value with its length. Empty if the text ends within it."""
    end = at + _LENGTH + int.from_bytes(text[at : at + _LENGTH], sys.byteorder)
    return text[at:end] if at + _LENGTH <= len(text) and end <= len(text) else b""


class Messages:
    """Messages of one side to the other, in order. Each side has its own object."""

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._name, self._count = store, f"launcher/{name}", 0

    def send(self, content: Mapping[str, object]) -> None:
        """Raises an error of `LOST` if the store cannot be written."""
        self._store.set(f"{self._name}/{self._count + 1}", json.dumps(content))
        self._count += 1

    def receive(self) -> Iterator[dict[str, Any]]:
        """Yields the messages since the last call.

        Raises an error of `LOST` at one that a stranger wrote. The other side then writes it, too.
        """
        while self._store.check([key := f"{self._name}/{self._count + 1}"]):
            text = self._store.get(key)
            self._count += 1
            yield json.loads(text)


class LauncherManager:
    """Rank 0's side: the launcher as a resource manager.

    The launcher has started the ranks on this machine, under Slurm or under Ray, and can start
    others. It sees by itself when a process ends, and gives back its node, job or actor then.
    """

    name = "launcher"
    can_start = True

    def __init__(self, store: Store) -> None:
        self._asked, self._told = Messages(store, "asked"), Messages(store, "told")
        self._unsaid: list[Report] = []

    def start(self, count: int) -> None:
        self._ask({"start": count}, count)

    def give_back(self, left: Sequence[RankPlace], stay: Sequence[RankPlace]) -> None:
        self._ask({"give_back": [place.process for place in left]}, 0)

    def ranks_are(self, places: Sequence[RankPlace]) -> None:
        """Says who is a rank now. The failure of any other process is no failure of the run."""
        self._ask({"ranks": [place.process for place in places]}, 0)

    def _ask(self, content: Mapping[str, object], ranks: int) -> None:
        try:
            self._asked.send(content)
        except LOST as error:  # the run goes on without an answer
            why = f"the launcher cannot be told {json.dumps(content)}: {error}"
            self._unsaid.append(Report("failed", why, ranks))

    def watch(self) -> list[Report]:
        unsaid, self._unsaid = self._unsaid, []
        with suppress(*LOST):
            for content in self._told.receive():
                unsaid.append(Report(**content))
        return unsaid

    def close(self) -> None:
        pass  # the launcher ends with the run
