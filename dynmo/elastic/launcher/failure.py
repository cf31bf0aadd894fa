"""Finds the cause of a failed run in the reports of its ranks."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dynmo.elastic.manager import RankProcess
from dynmo.elastic.managers.threaded import ending
from dynmo.errors import InputError, Interrupted, RunError

# The exit status of a rank that stopped on request. It is no failure, and other ranks may still
# have to write their files.
STOPPED = 130


@dataclass(frozen=True)
class Failure:
    """The failure report of a rank.

    Attributes:
        weight: Distance from the cause. Causes have lower weights than consequences.
        waits_for: Ranks that did not come.
        trace: The traceback, for DYNMO_TRACEBACK=1.
    """

    weight: int
    status: int
    message: str
    waits_for: tuple[int, ...] = ()
    trace: str = ""


def read_failures(folder: Path, ranks: Sequence[int]) -> dict[int, Failure]:
    """Reads what each process has left in the launch folder about its failure.

    Args:
        folder: The launch folder.
        ranks: The process of each rank. A failure waits for processes, too.
    """
    failures: dict[int, Failure] = {}
    for path in folder.glob("failed-*[0-9]"):
        failure = Failure(**json.loads(path.read_text("utf-8")))
        waits_for = tuple(ranks[rank] for rank in failure.waits_for if rank < len(ranks))
        number = int(path.name.removeprefix("failed-"))
        failures[number] = replace(failure, waits_for=waits_for)
    return failures


def verdict(
    processes: Mapping[int, RankProcess],
    reports: Mapping[int, Failure],
    log_folder: Path,
    asked: int,
) -> int:
    """Judges a run whose ranks have ended. Those that still run must be killed."""
    codes = {rank: process.poll() for rank, process in processes.items()}
    # A rank that was ended on request has not failed, and its peers' reports are consequences. Such
    # a rank was not training, or was asked twice. If one rank returned 130, all had agreed to stop,
    # and a late signal met the others on their way out.
    ours = (None, -signal.SIGTERM, -signal.SIGKILL) if asked else ()
    known = codes.values()
    ended = STOPPED not in known and (not codes or any(code in ours for code in known))
    failures: dict[int, Failure] = {}
    for rank, code in codes.items():
        if rank in reports:
            if not (ended and reports[rank].weight > 1):
                failures[rank] = reports[rank]
        elif code not in (None, 0, STOPPED) and code not in ours:
            how = how_it_ended(processes[rank], log_folder / f"rank-{rank}.log", rank == 0)
            failures[rank] = Failure(1, 1, f"rank {rank} {how}")
    if failures:
        if not asked and all(failure.weight > 1 for failure in failures.values()):
            # The others have lost a rank that says nothing, such as one that a layer ended.
            for rank, code in codes.items():
                if code == 0 and rank not in reports:
                    text = f"rank {rank} ended with status 0 before the run was over"
                    failures[rank] = Failure(1, 1, f"{text}, as if a layer called os._exit")
        cause = failures[min(failures, key=lambda rank: _distance(rank, failures))]
        error = (InputError if cause.status == 2 else RunError)(cause.message)
        if cause.trace:
            error.add_note(f"The rank's own traceback:\n{cause.trace}")
        raise error
    if not ended:
        return STOPPED if STOPPED in known else 0
    how = " while starting or finishing"
    if asked > 1:
        how = " twice, so the ranks were ended at once"
    elif None in known:
        how = "; not every rank came to a stop in time, so they were ended"
    raise Interrupted(f"interrupted{how}")


def how_it_ended(process: RankProcess, log: Path, on_terminal: bool = False) -> str:
    """Describes the end of a process without a report, such as "was ended by SIGABRT"."""
    code = process.poll()
    assert code is not None
    if reason := process.reason():
        return f"ended with status {code}: {reason}"
    if code == -signal.SIGKILL:
        return f"{ending(code)}; out of memory?"
    has_log = log.is_file() and log.stat().st_size if code < 0 else not on_terminal
    return f"{ending(code)}{f'; see {log}' if has_log else ''}"


def _distance(rank: int, failures: Mapping[int, Failure]) -> tuple[int, bool, int]:
    """Orders failures from cause to consequence.

    A rank that waited for ranks with reports of their own is further from the cause.
    """
    failure = failures[rank]
    waited = bool(failure.waits_for) and failures.keys() >= set(failure.waits_for)
    return failure.weight, waited, rank
