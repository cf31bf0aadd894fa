"""Starts the ranks of a run and supervises them until all have ended.

    dynmo train ── rank 0 ──── (terminal: progress, result)  runs/<name>/rank-0.log (crashes)
             ├──── rank 1 ──── runs/<name>/rank-1.log
             ├──── rank 2 ──── runs/<name>/rank-2.log
             └──── newcomer ── runs/<name>/rank-3.log   started when rank 0 asks for it

If rank 0 leaves, the output of the rank that takes over goes to the terminal from then on.

The ranks and their launcher talk through the store, which the launcher owns (`elastic/launch.py`).
Ctrl-C asks all ranks to stop after the current step. A second one kills them. SIGUSR1 asks them to
save. A rank that fails leaves its reason in the launch folder, which only this user can read. The
others are ended, and the cause is reported, not its consequences.

A run may change its ranks. A process that ends with status 0 disturbs no other. The failure of a
process that is not a rank yet, or not any more, is a report for rank 0 and no failure of the run.

A run may survive a dead rank (`elastic.recover`). The launcher then tells the other ranks that a
process has ended, ends one that they cannot reach, and waits until they go on without it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from dynmo.elastic.launch import LOST, FolderStore, Messages, ServedStore, Store
from dynmo.elastic.launcher.ends import Ends
from dynmo.elastic.launcher.environment import (
    clear_live_line,
    keep,
    launch_folder,
    most_local_ranks,
    process_environment,
)
from dynmo.elastic.launcher.failure import (
    STOPPED,
    Failure,
    how_it_ended,
    read_failures,
    verdict,
)
from dynmo.elastic.launcher.process import StartedProcess
from dynmo.elastic.manager import RankCommand, Report, Starter
from dynmo.elastic.managers.local import LocalStarter
from dynmo.elastic.managers.threaded import ThreadedManager
from dynmo.errors import ConfigError, RunError
from dynmo.signals import SAVE_SIGNAL, Asked, signals_heard

_logger = logging.getLogger(__name__)

# Seconds that the other ranks get after a failure, to find out for themselves and say why.
_GRACE = 3.0
_GRACE_WHEN_HUNG = 0.3
# Seconds between two looks at the processes, and for messages.
_TICK, _LOOK = 0.02, 0.2
# Seconds between two times at which the files of the launch folder are touched.
_TOUCH = 3600.0
# Seconds that a newcomer, or the thread that gives resources back, gets after the run's end.
_LAST = 5.0
# Ranks leave together, but one may take longer to end. The others are given back after these
# seconds.
_LEAVE_TOGETHER = 5.0


def spawn(
    command: Sequence[str],
    size: int,
    threads: int,
    log_folder: Path,
    starter: Starter | None = None,
    folder: Path | None = None,
    served: ServedStore | None = None,
    recovers_within: float | None = None,
) -> int:
    """Runs `command` as `size` ranks until all have ended. No process is left behind.

    The command calls `enter_rank` first. A newcomer is the command with `--join` added.

    Args:
        command: The argument list.
        size: The number of ranks at the start.
        threads: Threads of each rank.
        log_folder: Takes `rank-N.log`.
        starter: Starts the processes. None starts children on this machine.
        folder: The launch folder, which all machines of the run must see. It is made anew, and
            removed at the end. None means a temporary folder.
        served: The store in which the ranks meet. None means that they meet in `folder`.
        recovers_within: Seconds in which the other ranks must go on without one that has ended.
            None means that a rank that fails ends the run.

    Returns:
        0, or 130 if all ranks stopped because a signal asked.

    Raises:
        ConfigError: The ranks are too many for this machine. None was started.
        RunError: A rank failed. The message is the cause.
        InputError: A rank found that the input is wrong.
        Interrupted: A signal ended ranks that were not training.
    """
    if starter is None and size > most_local_ranks():
        raise ConfigError(
            f"parallel.pipeline x parallel.replicas = {size} ranks, but at most "
            f"{most_local_ranks()} start on this machine; use fewer, or start them on several "
            "machines with torchrun or Slurm"
        )
    starter = LocalStarter() if starter is None else starter
    with launch_folder(folder) as path, signals_heard(interrupts=False) as asked:
        where = path, log_folder, served and served.file
        run = Supervisor(starter, command, size, threads, *where, recovers_within, asked)
        try:
            for _ in range(size):
                run.start()
            run.watch(FolderStore(path) if served is None else served.open())
            return run.verdict()
        finally:
            run.end()
            # The log has only crashes, because the output went to the terminal.
            log = log_folder / "rank-0.log"
            if log.is_file() and not log.stat().st_size:
                log.unlink()


@dataclass
class Supervisor:
    """The processes of one run. `asked` says what signals have asked for."""

    starter: Starter
    command: Sequence[str]
    size: int
    threads: int
    folder: Path
    log_folder: Path
    rendezvous_file: Path | None
    recovers_within: float | None
    asked: Asked

    def __post_init__(self) -> None:
        self._processes: list[StartedProcess] = []
        self._ranks: list[StartedProcess] = []  # in order of ranks
        self._leaving: list[StartedProcess] = []
        self._leave_by = 0.0  # when those of them that have ended are given back at the latest
        self._ends: Ends | None = None  # of a run that survives a dead rank
        self._releases = ThreadedManager()
        self._reports: list[Report] = []
        self._is_removed = False  # the launch folder was removed once
        self._saves = self.asked.saves  # SIGUSR1 that the ranks have got, or none was there
        self._shown = Counter[int]()  # bytes of each process' log

    def start(self, joins: bool = False) -> None:
        number = len(self._processes)
        env = process_environment(number, self.size, self.folder, self.threads)
        if self.rendezvous_file is not None:
            env["DYNMO_RENDEZVOUS_FILE"] = str(self.rendezvous_file.absolute())
        if self.asked.stops:
            return
        rank = RankCommand(
            process=number,
            command=[*self.command, *["--join"] * joins],
            environment=env,
            # Rank 0 writes to the terminal. The others write to a log.
            log=self._log(number) if number else None,
            entered=self.folder / f"entered-{number}",
            joins=joins,
        )
        try:
            handle = self.starter.start(rank)
        except (OSError, RunError) as error:
            name = f"{'process' if joins else 'rank'} {number}"
            raise RunError(f"{name} could not be started: {error}") from None
        process = StartedProcess(number, handle, not joins, time.monotonic(), told=not joins)
        self._processes.append(process)
        if not joins:
            self._ranks.append(process)

    def _log(self, number: int) -> Path:
        return self.log_folder / f"rank-{number}.log"

    def watch(self, store: Store) -> None:
        """Waits until all ranks have ended, or the grace after a failure is over.

        After a signal the ranks finish their step and their files. A second signal ends the wait.
        Ranks that others have waited for in vain get the short grace, because they hang and will
        not say why.
        """
        self._from_ranks, self._to_ranks = Messages(store, "asked"), Messages(store, "told")
        if self.recovers_within is not None:
            self._ends = Ends(store, self._how_it_ended)
        failed_at, failed = 0.0, set[int]()
        next_look = next_touch = 0.0
        while self.asked.stops < 2:
            now = time.monotonic()
            for process in self._processes if self.asked.stops else ():
                process.ask_to_stop()
            if self.asked.saves > self._saves:
                self._ask_to_save()
            if now >= next_look:
                self._look()
                next_look = now + _LOOK
            if self._ends is not None:
                self._ends.tell(self._processes)
            living = {process.number for process in self._ranks if process.code is None}
            if not living:
                return
            if now >= next_touch:
                keep(self.folder)
                next_touch = now + _TOUCH
            self._give_back_ended(now)
            # A rank may have left, and the message of it come after its end.
            before, failed = failed, {process.number for process in self._ranks if process.failed}
            if failed and (not before or (self.recovers_within is not None and failed - before)):
                failed_at = now
            if failed and self._is_over(now - failed_at, living):
                return
            time.sleep(_TICK)

    def _is_over(self, seconds: float, living: set[int]) -> bool:
        """Returns whether a failure so long ago ends the run."""
        if seconds <= _GRACE_WHEN_HUNG:
            return False
        numbers, reports = {process.number for process in self._ranks}, self._failures()
        blamed = {each for number in numbers & reports.keys() for each in reports[number].waits_for}
        if self.recovers_within is None:
            return seconds > _GRACE or living <= blamed
        # Ranks that go on are blamed by nobody.
        return seconds > self.recovers_within or (seconds > _GRACE and living <= blamed)

    def _ask_to_save(self) -> None:
        """Hands SIGUSR1 on once all ranks run. It ends a process that waits for its resources."""
        living = [rank for rank in self._ranks if rank.code is None]
        if all(rank.runs for rank in living):
            self._saves = self.asked.saves
            for rank in living:
                rank.handle.send_signal(SAVE_SIGNAL)

    def _failures(self) -> dict[int, Failure]:
        return read_failures(self.folder, [process.number for process in self._ranks])

    # -- talking to rank 0 -------------------------------------------------------------------------

    def _look(self) -> None:
        """Takes the messages of rank 0, and tells it what has happened."""
        # Read before the messages, so that those of a process that has ended are there.
        ended = [process for process in self._processes if process.code is not None]
        # A listing shows new files of other machines at once. A network file system may keep the
        # answer that one file does not exist.
        try:
            names = {path.name for path in self.folder.iterdir()}
        except FileNotFoundError:
            names = set[str]()
            self._make_again()
        with contextlib.suppress(*LOST):
            for message in self._from_ranks.receive():
                self._act_on(**message)
        if self._ends is not None:
            self._ends.make(self._processes)
        self._show_output()
        for process in self._processes:
            seconds = time.monotonic() - process.started
            process.runs = process.runs or f"entered-{process.number}" in names
            if process.runs and not process.told:
                process.told = True
                host = json.loads((self.folder / f"entered-{process.number}").read_text())["host"]
                what = f"process {process.number} runs on {host}"
                self._reports.append(Report("started", what, 1, seconds))
            if process not in self._ranks and not process.ended and process in ended:
                process.ended = True
                self._tell_end(process, seconds)
        self._reports += self._releases.watch()
        with contextlib.suppress(*LOST):  # a full disk, or the run is over
            while self._reports:
                self._to_ranks.send(asdict(self._reports[0]))
                del self._reports[0]

    def _make_again(self) -> None:
        """Makes the launch folder anew, after a cleaner of temporary files or a user removed it."""
        if not self._is_removed:
            _logger.warning(
                f"{self.folder} was removed while the run uses it; the run goes on, but its ranks "
                "may not be able to leave or join"
            )
        self._is_removed = True
        with contextlib.suppress(OSError):  # then a failure tells less
            self.folder.mkdir(mode=0o700, parents=True)

    def _show_output(self) -> None:
        """Shows the log of rank 0, once that is a process that does not write to the terminal."""
        number = self._ranks[0].number if self._ranks else 0
        if not number:
            return
        with contextlib.suppress(OSError), self._log(number).open("rb") as log:
            log.seek(self._shown[number])
            lines = b"".join(log.read().rpartition(b"\n")[:2])
            self._shown[number] += len(lines)
            said = lines.partition(b"Traceback (most recent call last):")[
                0
            ]  # the rest is for the log
            sys.stderr.write(said.decode(errors="replace"))

    def _act_on(
        self, ranks: Sequence[int] = (), give_back: Sequence[int] = (), start: int = 0
    ) -> None:
        """Acts on a message of rank 0 (`LauncherManager`)."""
        known = dict(enumerate(self._processes))
        before = self._ranks
        if ranks:
            self._ranks = [known[number] for number in ranks if number in known]
        for process in self._ranks:
            process.was_rank = True
        gone = [process for process in before if process not in self._ranks]
        lost = self._ends.lost(gone) if self._ends is not None else []
        given = (known[number] for number in give_back if number in known)
        left = dict.fromkeys([*self._leaving, *lost, *given])
        # A parked rank may come back, and rank 0 may give back one that is lost.
        self._leaving = [each for each in left if each not in self._ranks and not each.released]
        if any(process.number == 0 for process in lost):
            clear_live_line()
        for _ in range(start if self._ranks[0].code is None else 0):
            try:
                self.start(joins=True)
            except RunError as error:
                self._reports.append(Report("failed", str(error), 1))

    def _tell_end(self, process: StartedProcess, seconds: float) -> None:
        """Tells rank 0 of a newcomer that did not join, or of a rank that failed after it left."""
        if process.was_rank and process.code in (0, STOPPED):
            return
        what = "had left the run and" if process.was_rank else "did not join: it"
        what = f"process {process.number} {what} {self._how_it_ended(process)}"
        # A rank that has left was not asked for.
        self._reports.append(Report("failed", what, int(not process.was_rank), seconds))

    def _how_it_ended(self, process: StartedProcess) -> str:
        failure = self._failures().get(process.number)
        if failure is not None:
            return f"failed: {failure.message}"
        if process.killed:
            return "did not answer and was ended"
        return how_it_ended(process.handle, self._log(process.number))

    def _give_back_ended(self, now: float) -> None:
        """Gives back the resources of processes that have left and ended."""
        ended = [process for process in self._leaving if process.code is not None]
        if not ended:
            self._leave_by = now + _LEAVE_TOGETHER
        elif len(ended) == len(self._leaving) or now > self._leave_by:
            self._leaving = [process for process in self._leaving if process not in ended]
            for process in ended:
                process.released = True
            handles = [process.handle for process in ended]
            self._releases.submit("released", len(ended), partial(self.starter.give_back, handles))

    # -- the end -----------------------------------------------------------------------------------

    def verdict(self) -> int:
        """Judges the run, and prints what the last rank 0 says of it if the first has left."""
        self._look()
        ranks = {process.number: process.handle for process in self._ranks}
        status = verdict(ranks, self._failures(), self.log_folder, self.asked.stops)
        for path in self.folder.glob("printed-*[0-9]"):
            sys.stdout.write(json.loads(path.read_text("utf-8"))["text"])
        return status

    def end(self) -> None:
        """Ends every process that still runs. Those outside may end by themselves first."""
        outside = [process for process in self._processes if process not in self._ranks]
        for process in outside:
            process.ask_to_stop()
        end = time.monotonic() + _LAST
        while any(process.code is None for process in outside) and time.monotonic() < end:
            if self.asked.stops > 1:
                break
            time.sleep(_TICK)
        living = [process.handle for process in self._processes if process.code is None]
        for handle in living:
            handle.kill()
        for handle in living:
            handle.wait()
        self._releases.close(max(0.0, end - time.monotonic()))
