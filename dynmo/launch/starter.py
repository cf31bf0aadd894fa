"""The interface of what starts rank processes: this machine, Slurm or Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class RankCommand:
    """One process to start.

    Attributes:
        process: Its number. The first processes are the ranks of the same numbers.
        command: The argument list.
        environment: All of its environment, except for what only the starter knows.
        log: Takes its output. None: the launcher's own output (rank 0).
        entered: The file that the process writes as it enters the run.
        joins: It joins a run that goes on. False: it is one of the first ranks.
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
        """Returns its exit status, or None while it runs or waits for its resources."""
        ...

    def send_signal(self, sig: int, /) -> None:
        """Sends a signal. Ends a process that still waits for its resources."""
        ...

    def kill(self) -> None:
        """Ends it at once."""
        ...

    def wait(self) -> int:
        """Waits for its end after `kill`, and returns its exit status."""
        ...

    def reason(self) -> str:
        """Returns what the manager said about its end: one line, or an empty string."""
        ...


class Starter(Protocol):
    """Starts processes, and gives back what they used."""

    def start(self, rank: RankCommand) -> RankProcess:
        """Begins to start a process. Does not wait for its resources.

        Raises:
            OSError: The program cannot be started.
            RunError: The manager refuses.
        """
        ...

    def released(self, processes: Sequence[RankProcess]) -> str:
        """Gives back what processes used that have left a run which goes on. May block.

        Args:
            processes: They left together and have ended with status 0.

        Returns:
            One line: what was given back.

        Raises:
            RunError: Nothing was given back. The message is one line with the manager's words.
        """
        ...

    def close(self) -> None:
        """Frees what the starter itself holds. Called after all processes have ended."""
        ...
