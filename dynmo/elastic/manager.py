"""Where ranks run, and the protocols of what starts them, gives them back and watches both.

A `Manager` is rank 0's side. Its calls come between two steps, and none waits for the manager.
Longer work runs beside the training, and its end is a report.

    rank 0       give_back(left, stay)        start(2)                        watch()
    manager        frees their nodes            starts `dynmo train --join`     results of both

A `Starter` is the launcher's side. It starts single processes on this machine, under Slurm or under
Ray. Each `RankProcess` says how it goes on.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

Kind = Literal["released", "started", "failed"]


@dataclass(frozen=True)
class RankPlace:
    """The process of one rank.

    Attributes:
        node: The resource manager's name of the machine or the pod. The default is `host`.
        process: The launcher's number of this process. None if no launcher of dynmo's started it.
        stays: Whether the run keeps this machine to the last, because its store ends with it.
    """

    rank: int
    host: str
    pid: int
    node: str = ""
    process: int | None = None
    stays: bool = False

    def __str__(self) -> str:
        return f"{self.node}:{self.pid}"


def own_node() -> str:
    named = os.environ.get("SLURMD_NODENAME") or os.environ.get("POD_NAME")
    return named or socket.gethostname()


def own_place(rank: int) -> RankPlace:
    process, node = os.environ.get("DYNMO_PROCESS", ""), own_node()
    number = int(process) if process.isdigit() else None
    # dynmo's launcher serves the store. Elsewhere rank 0 does, or torchrun's agent beside it.
    launcher = os.environ.get("DYNMO_LAUNCHER_NODE")
    stays = rank == 0 if launcher is None else node == launcher
    return RankPlace(rank, socket.gethostname(), os.getpid(), node, number, stays)


def count_text(count: int) -> str:
    return f"{count} more rank{'' if count == 1 else 's'}"


@dataclass(frozen=True)
class Report:
    """The result of `give_back` or `start`.

    Attributes:
        kind: "released", "started" (newcomers that may join soon), or "failed".
        what: One line about the result. After a failure it says what went wrong and what to do.
        ranks: Number of ranks that were given back or started.
        seconds: Seconds that the manager took.
    """

    kind: Kind
    what: str
    ranks: int = 0
    seconds: float = 0.0


class Manager(Protocol):
    """Gives ranks back to a resource manager, and asks it for others."""

    @property
    def name(self) -> str: ...

    @property
    def can_start(self) -> bool:
        """True if `start` starts ranks. If not, the user starts `dynmo train --join`."""
        ...

    def start(self, count: int) -> None:
        """Begins to start more processes that run `dynmo train CONFIG --join`."""
        ...

    def give_back(self, left: Sequence[RankPlace], stay: Sequence[RankPlace]) -> None:
        """Begins to give ranks back. Their processes have ended, end now, or are parked."""
        ...

    def watch(self) -> list[Report]:
        """Returns the reports since the last call."""
        ...

    def close(self, timeout: float = 3.0) -> None:
        """Ends the work beside the training, which gets so many seconds to finish."""
        ...


@dataclass(frozen=True)
class RankCommand:
    """One process to start.

    Attributes:
        process: Number of the process. The first processes are the ranks of the same numbers.
        command: The argument list.
        environment: The environment, without the variables that only the starter knows.
        log: Takes the output. None means the launcher's own output (rank 0).
        entered: The file that the process writes as it enters the run.
        joins: True for a newcomer. False for the first ranks.
    """

    process: int
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path | None
    entered: Path
    joins: bool = False


class RankProcess(Protocol):
    """A started process. Its statuses are those of `subprocess.Popen`: -9 after SIGKILL."""

    def poll(self) -> int | None:
        """Returns its exit status. None while it runs or waits for its resources."""
        ...

    def send_signal(self, sig: int, /) -> None:
        """Sends a signal. Ends a process that still waits for its resources."""
        ...

    def kill(self) -> None: ...

    def wait(self) -> object:
        """Waits for its end after `kill`."""
        ...

    def reason(self) -> str:
        """Returns the manager's message about its end: one line, or an empty string."""
        ...


class Starter(Protocol):
    """Starts processes, and gives their resources back."""

    def start(self, rank: RankCommand) -> RankProcess:
        """Begins to start a process. Does not wait for its resources.

        Raises:
            OSError: The program cannot be started.
            RunError: The manager refuses.
        """
        ...

    def ranks_left(self, size: int) -> int:
        """Returns how many of so many ranks can start again, after some of them have failed.

        Raises:
            RunError: The manager does not answer.
        """
        ...

    def give_back(self, processes: Sequence[RankProcess]) -> str:
        """Gives back the resources of processes that left together and have ended. May block.

        Returns:
            One line about the resources.

        Raises:
            RunError: Nothing was given back. The message is one line with the manager's words.
        """
        ...
