"""The interface of the starters of rank processes: this machine, Slurm or Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class RankCommand:
    """One process to start.

    Attributes:
        process: Number of the process. The first processes are the ranks of the same numbers.
        command: The argument list.
        environment: The environment, without the variables that only the starter knows.
        log: Takes the output. None means the launcher's own output (rank 0).
        entered: The file that the process writes as it enters the run.
        joins: True if the process joins a running run. False for the first ranks.
    """

    process: int
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path | None
    entered: Path
    joins: bool = False


class RankProcess(Protocol):
    """A started process.

    Its statuses are those of `subprocess.Popen`: -9 after SIGKILL.
    """

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

    def released(self, processes: Sequence[RankProcess]) -> str:
        """Gives back the resources of processes that have left a running run. May block.

        Args:
            processes: Processes that left together and have ended.

        Returns:
            One line about the resources that were given back.

        Raises:
            RunError: Nothing was given back. The message is one line with the manager's words.
        """
        ...

    def close(self) -> None:
        """Frees the starter's own resources. Called after all processes have ended."""
        ...
