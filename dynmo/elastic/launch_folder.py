"""The files through which rank 0, the joiners and their launcher communicate.

They lie in the launch folder, which the environment variable DYNMO_RENDEZVOUS names. Every machine
of the run sees the folder.

    rank 0 -> launcher     wanted-1.json {"count": 2}        start two more processes
                           free-1.json {"processes": [2]}    these leave: free their resources
    process -> launcher    entered-4 (host, pid, Slurm step) process 4 runs
                           member-4-7                        process 4 is a rank from generation 7
                           left-4-9                          process 4 is none from generation 9
                           failed-4.json                     why process 4 ended
    launcher -> rank 0     reports.jsonl                     results of releases and requests

Files with a count in their name are written in order: 1, 2, 3, ...
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dynmo.elastic.manager import Report
from dynmo.elastic.member import Member
from dynmo.files import write_whole

_logger = logging.getLogger(__name__)

REPORTS = "reports.jsonl"


class LaunchFolder:
    """Reads and writes the files of one launch folder.

    Each reader keeps its own place, so `next_note` and `new_reports` return everything once.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read: dict[str, int] = {}
        self._written: dict[str, int] = {}
        self._reports_at = 0

    def names(self) -> set[str]:
        """Returns the names of all files.

        A listing also shows new files of other machines at once. A network file system may keep
        the answer that one file does not exist.
        """
        return {path.name for path in self.path.iterdir()}

    def write_note(self, kind: str, content: Mapping[str, object]) -> None:
        """Writes the next `kind-<n>.json`. The kind is "wanted" or "free"."""
        count = self._written.get(kind, 0) + 1
        write_whole(self.path / f"{kind}-{count}.json", json.dumps(content))
        self._written[kind] = count

    def next_note(self, kind: str, names: set[str]) -> dict[str, Any] | None:
        """Reads the next `kind-<n>.json`."""
        count = self._read.get(kind, 0) + 1
        name = f"{kind}-{count}.json"
        if name not in names:
            return None
        self._read[kind] = count
        return json.loads((self.path / name).read_text(encoding="utf-8"))

    def enter(self, process: int, content: Mapping[str, object]) -> None:
        write_whole(self.entered(process), json.dumps(content))

    def entered(self, process: int) -> Path:
        return self.path / f"entered-{process}"

    def become_member(self, process: int, generation: int) -> None:
        """Writes that a process has become a rank of the run. Its failure now ends the run."""
        self._mark(f"member-{process}-{generation}")

    def leave(self, process: int, generation: int) -> None:
        """Writes that a process is no rank any more. Its failure ends nothing.

        Rank 0 and the process itself may both write it.
        """
        self._mark(f"left-{process}-{generation}")

    def _mark(self, name: str) -> None:
        """Makes an empty file. A run whose launcher cannot be told goes on."""
        try:
            (self.path / name).touch()
        except OSError as error:
            _logger.warning(f"{self.path / name} cannot be written: {error.strerror}")

    def changes(self, names: set[str]) -> dict[int, bool]:
        """Returns whether each process is a rank, of those that have joined or left."""
        last: dict[int, tuple[int, bool]] = {}
        for name in names:
            kind, _, numbers = name.partition("-")
            if kind in ("member", "left"):
                process, generation = map(int, numbers.split("-"))
                change = generation, kind == "member"
                last[process] = max(last.get(process, change), change)
        return {process: is_rank for process, (_, is_rank) in last.items()}

    def failures(self) -> dict[int, dict[str, Any]]:
        reports: dict[int, dict[str, Any]] = {}
        for path in self.path.glob("failed-*.json"):
            process = int(path.stem.removeprefix("failed-"))
            reports[process] = json.loads(path.read_text(encoding="utf-8"))
        return reports

    def write_failure(self, process: int, content: Mapping[str, object]) -> None:
        write_whole(self.path / f"failed-{process}.json", json.dumps(content))

    def append_report(self, report: Report) -> None:
        """Adds a line for rank 0. Only the launcher writes reports."""
        with (self.path / REPORTS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(report)) + "\n")

    def new_reports(self) -> list[Report]:
        """Returns the whole lines that were added since the last call."""
        if REPORTS not in self.names():
            return []
        with (self.path / REPORTS).open("rb") as file:
            file.seek(self._reports_at)
            whole = file.read().rpartition(b"\n")
        self._reports_at += len(whole[0]) + len(whole[1])
        lines: Sequence[bytes] = whole[0].splitlines()
        return [Report(**json.loads(line)) for line in lines]


def launch_folder() -> LaunchFolder | None:
    """Returns the folder of the launcher of dynmo that started this process, if one did."""
    path = os.environ.get("DYNMO_RENDEZVOUS")
    return None if path is None else LaunchFolder(Path(path))


def tell_launcher(left: Sequence[Member], generation: int) -> None:
    """Tells dynmo's launcher, if it started these processes, that they are no ranks any more.

    Args:
        left: Ranks that are out of the run.
        generation: The first generation without them.
    """
    launcher = launch_folder()
    for member in left:
        if launcher is not None and member.process is not None:
            launcher.leave(member.process, generation)
