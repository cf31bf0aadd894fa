"""Starts the ranks of a run and supervises them until all have ended.

    dynmo train ── rank 0 ── (terminal: progress, result)  runs/<name>/rank-0.log (crashes)
             ├──── rank 1 ── runs/<name>/rank-1.log
             ├──── rank 2 ── runs/<name>/rank-2.log
             └──── joiner ── runs/<name>/rank-3.log   started when rank 0 asks for it

The ranks talk to their launcher through a folder that only this user can read. Ctrl-C asks all
ranks to stop after the current step. A second one kills them. A rank that fails leaves its reason
in the folder. The others are ended, and the cause is reported, not its consequences.

A run may change its ranks. A process that ends with status 0 disturbs no other. The failure of a
process that is not a rank yet, or not any more, is a report for rank 0 and no failure of the run.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from dynmo.elastic.launch_folder import LaunchFolder
from dynmo.elastic.launcher.environment import most_local_ranks, process_environment
from dynmo.elastic.launcher.failure import STOPPED, Ending, how_it_ended, read_failures, verdict
from dynmo.elastic.manager import RankCommand, RankProcess, Report, Starter
from dynmo.elastic.managers.local import STOP_SIGNALS, LocalStarter
from dynmo.errors import ConfigError, RunError

# Seconds that the other ranks get after a failure, to find out for themselves and say why.
_GRACE = 3.0
_GRACE_WHEN_HUNG = 0.3
# Seconds between two looks at the processes, and into the launch folder.
_TICK, _LOOK = 0.02, 0.2
# Seconds that a joiner, or a thread that gives resources back, gets after the end of the run.
_LAST = 5.0
# Ranks leave together, but one may take longer to end. The others are released after these seconds.
_RELEASE_TOGETHER = 5.0


def spawn(
    command: Sequence[str],
    size: int,
    threads: int,
    log_folder: Path,
    starter: Starter | None = None,
    folder: Path | None = None,
    rendezvous_file: Path | None = None,
) -> int:
    """Runs `command` as `size` ranks until all have ended. No process is left behind.

    The command calls `enter_rank` first. A joiner is the command with `--join` added.

    Args:
        command: The argument list.
        size: The number of ranks at the start.
        threads: Threads of each rank.
        log_folder: Takes `rank-N.log`.
        starter: Starts the processes, and is closed at the end. None starts children on this
            machine.
        folder: The launch folder, which all machines of the run must see. It is made anew, and
            removed at the end. None means a temporary folder.
        rendezvous_file: The file through which the ranks meet. The caller removes it before and
            after. None means a file in `folder`.

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
    with contextlib.closing(starter), _launch_folder(folder) as path, _signals() as asked:
        launch = LaunchFolder(path)
        run = Supervisor(
            starter, command, size, threads, launch, log_folder, rendezvous_file, asked
        )
        try:
            run.start_ranks()
            run.watch()
            return run.verdict()
        finally:
            run.end()
            # The log has only crashes, because the output went to the terminal.
            log = log_folder / "rank-0.log"
            if log.is_file() and not log.stat().st_size:
                log.unlink()


@contextlib.contextmanager
def _launch_folder(folder: Path | None) -> Iterator[Path]:
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="dynmo-") as name:
            yield Path(name)
        return
    folder = folder.absolute()
    try:
        if folder.exists():  # left by a launcher that was killed
            shutil.rmtree(folder)
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise RunError(f"{folder} cannot be made: {error}") from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _signals() -> Iterator[list[float]]:
    """Yields the times of SIGINT and SIGTERM while it is open. They ask for a stop."""
    asked: list[float] = []

    def ask(number: int, frame: FrameType | None) -> None:
        asked.append(time.monotonic())

    before = {number: signal.signal(number, ask) for number in STOP_SIGNALS}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class _Process:
    """A started process.

    Attributes:
        number: The launcher's number.
        is_rank: False for a process that is not a rank yet, or not any more.
        told: Number of stop signals that were passed on.
        entered: Whether rank 0 was told that the joiner runs.
        ended: Whether its end outside of the run was seen.
    """

    number: int
    handle: RankProcess
    is_rank: bool
    started: float
    told: int = 0
    entered: bool = False
    ended: bool = False


@dataclass
class _Leaving:
    """Processes that leave the run together, and when the first of them had ended."""

    processes: list[_Process]
    since: float | None = None


@dataclass
class Supervisor:
    """The processes of one run. `asked` has the times of signals that ask for a stop."""

    starter: Starter
    command: Sequence[str]
    size: int
    threads: int
    folder: LaunchFolder
    log_folder: Path
    rendezvous_file: Path | None
    asked: Sequence[float]

    def __post_init__(self) -> None:
        self._processes: list[_Process] = []
        self._next = self.size
        self._leaving: list[_Leaving] = []
        self._resized = False
        self._releases: list[threading.Thread] = []
        self._reports = threading.Lock()

    def start_ranks(self) -> None:
        for rank in range(self.size):
            if not self.asked:
                self._start(rank, joins=False)

    def _start(self, number: int, joins: bool) -> None:
        env = process_environment(number, self.size, self.folder.path, self.threads)
        env |= {"DYNMO_JOIN": "1"} if joins else {}
        if self.rendezvous_file is not None:
            env["DYNMO_RENDEZVOUS_FILE"] = str(self.rendezvous_file.absolute())
        if self.asked:
            return
        rank = RankCommand(
            process=number,
            command=[*self.command, *["--join"] * joins],
            environment=env,
            # Rank 0 writes to the terminal. The others write to a log.
            log=self.log_folder / f"rank-{number}.log" if number else None,
            entered=self.folder.entered(number),
            joins=joins,
        )
        started = time.monotonic()
        try:
            handle = self.starter.start(rank)
        except (OSError, RunError) as error:
            name = "process" if joins else "rank"
            raise RunError(f"{name} {number} could not be started: {error}") from None
        self._processes.append(_Process(number, handle, not joins, started, entered=not joins))

    @property
    def _ranks(self) -> list[_Process]:
        return [process for process in self._processes if process.is_rank]

    @property
    def _outside(self) -> list[_Process]:
        """Processes that are not ranks yet, or not any more."""
        return [process for process in self._processes if not process.is_rank]

    def watch(self) -> None:
        """Waits until all ranks have ended, or the grace after a failure is over.

        After a signal the ranks finish their step and their files. A second signal kills them.
        Ranks that others have waited for in vain get the short grace, because they hang and will
        not say why.
        """
        failed_at: float | None = None
        next_look = 0.0
        while True:
            now = time.monotonic()
            self._pass_on_signals()
            if now >= next_look or self._ended_outside():
                self._look()
                next_look = now + _LOOK
            codes = {rank.number: rank.handle.poll() for rank in self._ranks}
            living = {number for number, code in codes.items() if code is None}
            if not living:
                return
            if codes[0] is None:
                self._release(now)
            else:
                self._dismiss()
            failed = any(code not in (None, 0, STOPPED) for code in codes.values())
            # A rank may have left, and the note of it come after its end.
            failed_at = (failed_at or now) if failed else None
            if failed_at is not None and now - failed_at > _GRACE_WHEN_HUNG:
                blamed = {
                    rank
                    for number, failure in read_failures(self.folder, self._resized).items()
                    for rank in failure.waits_for
                    if number in codes
                }
                if now - failed_at > _GRACE or living <= blamed:
                    return
            time.sleep(_TICK)

    def _pass_on_signals(self) -> None:
        asked = len(self.asked)
        for process in self._processes:
            while process.told < min(asked, 2):
                process.told += 1
                if process.handle.poll() is None:
                    if process.told == 1:
                        process.handle.send_signal(signal.SIGTERM)
                    else:
                        process.handle.kill()

    def _look(self) -> None:
        """Reads new files in the launch folder."""
        ended = self._ended_outside()
        names = self.folder.names()  # read after an end was seen, so the process's files are there
        changes = self.folder.changes(names)
        self._resized = bool(changes)
        for process in self._processes:
            number, seconds = process.number, time.monotonic() - process.started
            if not process.entered and f"entered-{number}" in names:
                process.entered = True
                entered = self.folder.entered(number).read_text(encoding="utf-8")
                host = json.loads(entered).get("host", "its machine")
                self._append("started", f"process {number} runs on {host}", 1, seconds)
            process.is_rank = changes.get(number, process.is_rank)
            if not process.is_rank and process in ended:
                process.ended = True
                self._tell_end(process, left=number in changes, seconds=seconds)
        while (free := self.folder.next_note("free", names)) is not None:
            numbers = free["processes"]
            leaving = [process for process in self._processes if process.number in numbers]
            self._leaving.append(_Leaving(leaving))
        while (wanted := self.folder.next_note("wanted", names)) is not None:
            for _ in range(wanted["count"]):
                self._start_joiner()

    def _start_joiner(self) -> None:
        number, self._next = self._next, self._next + 1
        rank_0 = next(process for process in self._processes if process.number == 0)
        if self.asked or rank_0.handle.poll() is not None:
            return
        try:
            self._start(number, joins=True)
        except RunError as error:
            self._append("failed", str(error), 1, 0.0)

    def _ended_outside(self) -> list[_Process]:
        """Processes outside of the run whose end nobody has seen yet."""
        return [p for p in self._outside if not p.ended and p.handle.poll() is not None]

    def _tell_end(self, process: _Process, left: bool, seconds: float) -> None:
        """Tells rank 0 of a joiner that did not join, or of a rank that failed after it left."""
        ending = Ending(process.handle.poll(), process.handle.reason())
        if left and ending.code in (0, STOPPED):
            return
        log = self.log_folder / f"rank-{process.number}.log"
        failure = read_failures(self.folder).get(process.number)
        why = how_it_ended(ending, log) if failure is None else f"failed: {failure.message}"
        what = "had left the run and" if left else "did not join: it"
        # A rank that has left was not asked for.
        self._append("failed", f"process {process.number} {what} {why}", int(not left), seconds)

    def _release(self, now: float) -> None:
        """Gives back the resources of processes that have left and ended."""
        for leaving in self._leaving:
            ended = [process for process in leaving.processes if process.handle.poll() is not None]
            if ended and leaving.since is None:
                leaving.since = now
            all_ended = len(ended) == len(leaving.processes)
            late = leaving.since is not None and now - leaving.since > _RELEASE_TOGETHER
            if ended and (all_ended or late):
                leaving.processes = [p for p in leaving.processes if p not in ended]
                handles = [process.handle for process in ended]
                thread = threading.Thread(target=self._give_back, args=(handles,), daemon=True)
                self._releases.append(thread)
                thread.start()
        self._leaving = [leaving for leaving in self._leaving if leaving.processes]

    def _give_back(self, handles: Sequence[RankProcess]) -> None:
        begin = time.monotonic()
        try:
            kind, what = "released", self.starter.released(handles)
        except RunError as error:
            kind, what = "failed", str(error)
        self._append(kind, what, len(handles), time.monotonic() - begin)

    def _append(self, kind: Any, what: str, ranks: int, seconds: float) -> None:
        report = Report(kind, " ".join(what.split()), ranks, round(seconds, 3))
        # The disk may be full, or the run may be over. Nobody needs the report then.
        with self._reports, contextlib.suppress(OSError):
            self.folder.append_report(report)

    def _dismiss(self) -> None:
        """Asks processes outside of the run to end, because it is over."""
        for process in self._outside:
            if not process.told and process.handle.poll() is None:
                process.told = 1
                process.handle.send_signal(signal.SIGTERM)

    def verdict(self) -> int:
        self._look()
        handles = {rank.number: rank.handle for rank in self._ranks}
        endings = {at: Ending(handle.poll(), handle.reason()) for at, handle in handles.items()}
        reports = read_failures(self.folder, self._resized)
        return verdict(endings, reports, self.log_folder, len(self.asked))

    def end(self) -> None:
        """Ends every process that still runs. Those outside may end by themselves first."""
        with contextlib.suppress(OSError):
            self._dismiss()
        end = time.monotonic() + _LAST
        while any(p.handle.poll() is None for p in self._outside) and time.monotonic() < end:
            if len(self.asked) > 1:
                break
            time.sleep(_TICK)
        for process in self._processes:
            if process.handle.poll() is None:
                process.handle.kill()
        for process in self._processes:
            process.handle.wait()
        for thread in self._releases:
            thread.join(max(0.0, end - time.monotonic()))
