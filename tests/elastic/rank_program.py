"""A rank without torch: it enters, and does what a script for its process says.

    python rank_program.py FOLDER [--join]

FOLDER/script-N.py is the script of process N. A newcomer runs FOLDER/script-join.py if it has none
of its own. Scripts use the names of this file.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from dynmo.elastic.launch import Arbiter, FolderStore, LauncherManager
from dynmo.elastic.launcher.rank_side import enter_rank, report_failure
from dynmo.elastic.manager import RankPlace, Report
from dynmo.errors import DynmoError, RunError

LIMIT = 40.0
process = int(os.environ["DYNMO_PROCESS"])
joins = "--join" in sys.argv
here = Path(sys.argv[1])
store = FolderStore(Path(os.environ["DYNMO_RENDEZVOUS"]))
manager, arbiter = LauncherManager(store), Arbiter(store)
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


def places(processes: Iterable[int]) -> list[RankPlace]:
    return [RankPlace(rank, "host", 0, process=each) for rank, each in enumerate(processes)]


def ranks_are(*processes: int) -> None:
    """Says as rank 0 who is a rank now."""
    manager.ranks_are(places(processes))


def give_back(*processes: int, stay: Sequence[int]) -> None:
    """Says as rank 0 that processes leave, and which ones stay."""
    ranks_are(*stay)
    manager.give_back(places(processes), places(stay))


def ended(number: int) -> None:
    """Waits until the launcher says that a process has ended."""
    until(lambda: arbiter.has_ended(number), f"the end of process {number}")


def reports(count: int) -> list[Report]:
    """Returns the first reports of the launcher as rank 0, once there are so many."""

    def enough() -> bool:
        _reports.extend(manager.watch())
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
