"""A rank without torch: it enters, and does what a script for its process says.

    python rank_program.py FOLDER [--join]

FOLDER/script-N.py is the script of process N. A joiner runs FOLDER/script-join.py if it has none of
its own. Scripts use the names of this file.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from dynmo.elastic.launch_folder import LaunchFolder
from dynmo.elastic.launcher.rank_side import enter_rank, report_failure
from dynmo.elastic.manager import Report
from dynmo.elastic.managers.launcher import LauncherManager
from dynmo.elastic.member import Member
from dynmo.errors import DynmoError, RunError

LIMIT = 40.0
process = int(os.environ["DYNMO_PROCESS"])
joins = "--join" in sys.argv
here = Path(sys.argv[1])
launch_folder = Path(os.environ["DYNMO_RENDEZVOUS"])
manager = LauncherManager(launch_folder)
signals: list[int] = []
_reports: list[Report] = []


def until(condition: Callable[[], object], what: str) -> None:
    """Waits. The limit ends a test that hangs."""
    end = time.monotonic() + LIMIT
    while not condition():
        if time.monotonic() > end:
            raise RunError(f"process {process} waited {LIMIT:g} s for {what}")
        time.sleep(0.02)


def say(name: str) -> None:
    """Leaves a file for the others and for the test."""
    (here / name).write_text(f"{os.getpid()}")


def heard(name: str) -> None:
    """Waits for a file of another process or of the test."""
    until(lambda: (here / name).exists(), name)


def become_member(generation: int = 1) -> None:
    """Says that this process is a rank now."""
    LaunchFolder(launch_folder).become_member(process, generation)


def release(*processes: int) -> None:
    """Says as rank 0 that processes leave."""
    for number in processes:
        LaunchFolder(launch_folder).leave(number, 1)
    manager.release([Member(number, "host", 0, process=number) for number in processes], [])


def reports(count: int) -> list[Report]:
    """Returns the first reports of the launcher as rank 0, once there are so many."""

    def enough() -> bool:
        _reports.extend(manager.reports())
        return len(_reports) >= count

    until(enough, f"{count} reports, but has {_reports}")
    with (here / "reports").open("w") as file:
        file.writelines(f"{r.kind} {r.ranks}: {r.what}\n" for r in _reports)
    return _reports


def main() -> int:
    enter_rank(here / f"crash-{process}.log")
    signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    own = here / f"script-{process}.py"
    path = here / "script-join.py" if joins and not own.exists() else own
    try:
        exec(compile(path.read_text(), path, "exec"), globals())
    except DynmoError as error:
        return report_failure(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
