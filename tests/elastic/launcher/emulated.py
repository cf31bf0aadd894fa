"""The launcher in this process, over ranks that are generators, in a time of its own.

A script gets its process and yields to let time pass. It returns the exit status, or raises.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from unittest import mock

from dynmo.elastic.launch import Arbiter, FolderStore, LauncherManager
from dynmo.elastic.launcher import supervisor
from dynmo.elastic.launcher.rank_side import report_failure
from dynmo.elastic.manager import Kind, RankCommand, RankPlace, RankProcess, Report
from dynmo.elastic.managers.local import LocalStarter
from dynmo.elastic.managers.threaded import ThreadedManager

Steps = Generator[None, None, "int | None"]
Script = Callable[["EmulatedProcess"], Steps]


class EmulatedProcess:
    """A process of the launcher. It goes on by one `yield` whenever the launcher sleeps."""

    def __init__(self, command: RankCommand, script: Script) -> None:
        self.number = command.process
        self.signals: list[int] = []
        self.told: list[str] = []
        self.code: int | None = None
        self.environment = command.environment
        store = FolderStore(Path(command.environment["DYNMO_RENDEZVOUS"]))
        self._manager, self.arbiter = LauncherManager(store), Arbiter(store)
        self._log = command.log
        command.entered.write_text('{"host": "here"}')
        self._script = script(self)

    def go_on(self) -> None:
        if self.code is not None:
            return
        try:
            next(self._script)
        except StopIteration as end:
            self.code = end.value or 0
        except Exception as error:
            with mock.patch.dict(os.environ, self.environment):
                self.code = report_failure(error, self._log)

    # -- what scripts do ---------------------------------------------------------------------------

    def until(self, condition: Callable[[], object]) -> Generator[None, None, None]:
        while not condition():
            yield

    def asked(self) -> Generator[None, None, None]:
        """Waits for the signal that asks for a stop."""
        yield from self.until(lambda: self.signals)

    def start(self, count: int) -> None:
        self._manager.start(count)

    def ranks_are(self, *processes: int) -> None:
        """Says as rank 0 who is a rank now."""
        self._manager.ranks_are(_places(processes))

    def succeeds(self) -> None:
        """Becomes rank 0 after one that is gone."""
        self._manager.find_counts()

    def give_back(self, *processes: int, stay: Sequence[int] = (0,)) -> None:
        """Says as rank 0 who goes on, and that other processes leave."""
        self.ranks_are(*stay)
        self._manager.give_back(_places(processes), [])

    def reports(self, count: int) -> Generator[None, None, None]:
        """Reads what the launcher tells rank 0, until it has told so much."""

        def enough() -> bool:
            said = self._manager.watch()
            self.told += [f"{report.kind} {report.ranks}: {report.what}" for report in said]
            return len(self.told) >= count

        yield from self.until(enough)

    # -- what the launcher does --------------------------------------------------------------------

    def poll(self) -> int | None:
        return self.code

    def send_signal(self, sig: int, /) -> None:
        self.signals.append(sig)

    def kill(self) -> None:
        self.code = -9

    def wait(self) -> int:
        assert self.code is not None
        return self.code

    def reason(self) -> str:
        return ""


def _places(processes: Sequence[int]) -> list[RankPlace]:
    return [RankPlace(rank, "host", 0, process=each) for rank, each in enumerate(processes)]


class AtOnce(ThreadedManager):
    """Gives resources back without a thread."""

    def submit(self, kind: Kind, ranks: int, call: Callable[[], str]) -> None:
        self._reports.put(Report(kind, call(), ranks))


class EmulatedRun(LocalStarter):
    """Starts emulated processes. It is the launcher's clock, too."""

    def __init__(self, scripts: Sequence[Script], join: Script | None) -> None:
        super().__init__()
        self.processes: list[EmulatedProcess] = []
        self._scripts = [*scripts]
        self._join = join
        self.now = 0.0

    def start(self, rank: RankCommand) -> RankProcess:
        script = self._join if rank.joins else self._scripts[rank.process]
        assert script is not None
        self.processes.append(EmulatedProcess(rank, script))
        return self.processes[-1]

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        assert self.now < 1000, "the run does not end"
        for process in self.processes:
            process.go_on()

    def launch(self, folder: Path, recovers_within: float | None = None) -> int:
        with mock.patch.multiple(supervisor, time=self, ThreadedManager=AtOnce):
            within = recovers_within
            return supervisor.spawn(
                ["rank"], len(self._scripts), 1, folder, self, recovers_within=within
            )


def launch(
    folder: Path, *scripts: Script, join: Script | None = None, recovers_within: float | None = None
) -> tuple[int, list[str]]:
    """Runs these ranks. Returns the status and what rank 0 was told."""
    run = EmulatedRun(scripts, join)
    status = run.launch(folder, recovers_within)
    return status, run.processes[0].told


def ends(status: int = 0, after: int = 1) -> Script:
    """A process that ends with this status after some looks of the launcher."""

    def script(me: EmulatedProcess) -> Steps:
        yield from [None] * after
        return status

    return script


def stops(me: EmulatedProcess) -> Steps:
    yield from me.asked()
    return 130
