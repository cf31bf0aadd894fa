"""What a launcher and its ranks tell each other.

    in the store     launcher/asked/1   {"start": 2}            rank 0 wants two newcomers
                     launcher/asked/2   {"ranks": [0, 1, 4]}    these processes are the ranks now
                     launcher/asked/3   {"give_back": [2, 3]}   free what these processes had
                     launcher/told/1    {"kind": "released"..   what became of it
                     launcher/end/2     1                       any rank: end this process
                     launcher/ended/2   "was ended by SIGKILL"  the launcher: so it has ended
    in the folder    entered-4          host, Slurm step        process 4 runs
                     failed-4                                   why process 4 ended

The launcher owns the store. On one machine it needs no torch: its store is the folder, with a file
for each key. A process reaches only the folder before it has loaded torch, and when the store is
lost. The environment variable DYNMO_RENDEZVOUS names the folder.

The keys launcher/end and launcher/ended are for runs that survive a dead rank (`elastic.recover`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dynmo.elastic.manager import RankPlace, Report
from dynmo.errors import RunError
from dynmo.files import write_whole

# Errors of a store that is lost, damaged or full.
LOST = (OSError, RuntimeError, ValueError)


class Store(Protocol):
    """What is needed of torch's stores."""

    def check(self, keys: list[str], /) -> bool: ...

    def get(self, key: str, /) -> bytes: ...

    def set(self, key: str, value: str, /) -> None: ...


@dataclass(frozen=True)
class ServedStore:
    """A store that the launcher serves to ranks.

    Attributes:
        file: Says where it is. The caller removes it before the run and after it.
        open: Opens the store and writes the file, once the ranks start.
    """

    file: Path
    open: Callable[[], Store]


class FolderStore:
    """Keeps each value in a file of the launch folder, for processes without torch."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _file(self, key: str) -> Path:
        return self._folder / key.replace("/", "-")

    def check(self, keys: list[str], /) -> bool:
        return all(self._file(key).exists() for key in keys)

    def get(self, key: str, /) -> bytes:
        return self._file(key).read_bytes()

    def set(self, key: str, value: str, /) -> None:
        """Raises OSError if the file cannot be written. No half of it stays."""
        write_whole(self._file(key), value)


class Messages:
    """Messages of one side to the other, in order. Each side has its own object.

    Attributes:
        count: Messages that were sent or received, by an earlier rank 0 too.
    """

    def __init__(self, store: Store, name: str, count: int = 0) -> None:
        self._store, self._name, self.count = store, f"launcher/{name}", count

    def send(self, content: Mapping[str, object]) -> None:
        """Raises an error of `LOST` if the store cannot be written."""
        self._store.set(f"{self._name}/{self.count + 1}", json.dumps(content))
        self.count += 1

    def receive(self) -> Iterator[dict[str, Any]]:
        """Yields the messages since the last call.

        Raises an error of `LOST` at one that a stranger wrote. The other side then writes it, too.
        """
        while self._store.check([key := f"{self._name}/{self.count + 1}"]):
            text = self._store.get(key)
            self.count += 1
            yield json.loads(text)

    def find_count(self) -> int:
        """Counts the messages in the store. A rank 0 that is gone has sent or received them."""
        while self._store.check([f"{self._name}/{self.count + 1}"]):
            self.count += 1
        return self.count


def find(store: Store, key: str) -> str:
    """Returns a text of the run, or an empty string."""
    try:
        return store.get(key).decode() if store.check([key]) else ""
    except RunError:  # a process of another run has written it
        return ""


def end_key(process: int) -> str:
    return f"launcher/end/{process}"


def ended_key(process: int) -> str:
    return f"launcher/ended/{process}"


class Arbiter:
    """The launcher as a rank sees it that has lost another one.

    Args:
        store: The store in which the first generation of ranks meets.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def has_ended(self, process: int) -> bool:
        """Returns whether a process of the launcher has ended. Raises `LOST` without a store."""
        return self.how_it_ended(process) != ""

    def how_it_ended(self, process: int) -> str:
        """Returns, for example, "was ended by SIGKILL". Empty while the process runs."""
        return find(self._store, ended_key(process))

    def end(self, process: int) -> None:
        """Asks the launcher to end a process at once, though it was stopped or hangs."""
        self._store.set(end_key(process), "1")


class LauncherManager:
    """Rank 0's side: the launcher as a resource manager.

    The launcher has started the ranks on this machine, under Slurm or under Ray, and can start
    others. It sees by itself when a process ends, and gives back its node, job or actor then.
    """

    name = "launcher"
    can_start = True

    def __init__(self, store: Store, asked: int = 0, told: int = 0) -> None:
        self._asked, self._told = Messages(store, "asked", asked), Messages(store, "told", told)
        self._unsaid: list[Report] = []

    @property
    def counts(self) -> tuple[int, int]:
        """The arguments with which another rank 0 goes on."""
        return self._asked.count, self._told.count

    def find_counts(self) -> None:
        """Goes on after a rank 0 that is gone."""
        self._asked.find_count()
        self._told.find_count()

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

    def close(self, timeout: float = 0.0) -> None:
        pass  # the launcher ends with the run
