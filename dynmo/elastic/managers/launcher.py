"""dynmo's launcher as a resource manager: it started the ranks, and can start more of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from dynmo.elastic.launch_folder import LaunchFolder
from dynmo.elastic.manager import Report
from dynmo.elastic.member import Member


class LauncherManager:
    """Asks `dynmo train`'s own launcher on this machine, under Slurm or under Ray.

    The launcher sees by itself when a process ends. `release` names processes. Once these have
    ended, the launcher gives their node, job or actor back.
    """

    name = "launcher"
    can_request = True

    def __init__(self, folder: Path) -> None:
        self._folder = LaunchFolder(folder)
        self._untold: list[Report] = []  # notes that could not be written

    def release(self, left: Sequence[Member], stay: Sequence[Member]) -> None:
        processes = [member.process for member in left if member.process is not None]
        if processes:
            self._tell("free", {"processes": processes}, 0)

    def request(self, count: int) -> None:
        self._tell("wanted", {"count": count}, count)

    def _tell(self, kind: str, content: Mapping[str, object], ranks: int) -> None:
        try:
            self._folder.write_note(kind, content)
        except OSError as error:  # the run goes on without an answer
            why = f"no note to the launcher can be written in {self._folder.path}: {error.strerror}"
            self._untold.append(Report("failed", why, ranks))

    def reports(self) -> list[Report]:
        untold, self._untold = self._untold, []
        return [*untold, *self._folder.new_reports()]

    def close(self) -> None:
        pass  # the launcher ends with the run
