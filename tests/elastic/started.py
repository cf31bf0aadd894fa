"""Processes that a test starts next to a cluster."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.processes import end_all, start


class StartedProcesses:
    """Starts processes, and ends those that are left.

    A cluster inherits from it. Its `inside` and `environment` say how a process reaches it.
    """

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[str]] = []

    def inside(self, command: Sequence[str]) -> Sequence[str]:
        """Returns the command that runs another one where the cluster can be reached."""
        return command

    def environment(self) -> dict[str, str]:
        """Returns the variables of a process that uses the cluster."""
        return {}

    def start(
        self, command: Sequence[str], folder: Path, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Starts a process outside of any job. It is ended with the cluster at the latest."""
        given = {**self.environment(), **(env or {})}
        self._started.append(start(self.inside(command), folder, given))
        return self._started[-1]

    def end_started(self) -> None:
        """Ends the processes that `start` has started."""
        end_all(self._started)
