"""Gives ranks back, and asks for others, by commands of the user's own.

    release(left, stay)   DYNMO_LEFT='[{"rank": 3, ...}]' DYNMO_STAY='[...]' give-back.sh
    request(2)            DYNMO_COUNT=2 start-ranks.sh

The commands run one after another, beside the training. The last line of their output becomes part
of the report.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Literal

from dynmo.elastic.manager import Report
from dynmo.elastic.member import Member
from dynmo.errors import ConfigError, DynmoError, RunError

_logger = logging.getLogger(__name__)

# A command that starts ranks must not pass these on, because they name a rank of this run.
_RANK_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "DYNMO_RENDEZVOUS",
    "DYNMO_RENDEZVOUS_FILE",
    "DYNMO_PROCESS",
    "DYNMO_JOIN",
    "DYNMO_LAUNCHER",
)


class ThreadedManager:
    """Runs calls one after another in a thread, and keeps a report of each.

    A call that raises an exception gives a "failed" report. Nothing is raised in the training.
    """

    def __init__(self, name: str) -> None:
        self._stopping = threading.Event()
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._reports: list[Report] = []
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def _submit(
        self, kind: Literal["released", "started"], ranks: int, call: Callable[[], str]
    ) -> None:
        with self._lock:
            if self._closed:
                self._reports.append(Report("failed", "the run has ended", ranks))
                return
            if self._thread.ident is None:
                try:
                    self._thread.start()
                except RuntimeError as error:  # the limit of threads
                    self._reports.append(Report("failed", f"{error}; raise the limit", ranks))
                    return
        self._calls.put((kind, ranks, call))

    @property
    def _has_more(self) -> bool:
        """True if other calls wait for the current one."""
        return not self._closed and not self._calls.empty()

    def reports(self) -> list[Report]:
        with self._lock:
            reports, self._reports = self._reports, []
        return reports

    def close(self, timeout: float = 3.0) -> None:
        """Waits a little for the queued calls, then asks the current one to stop.

        Calls that have not begun by then are dropped. Each gives a "failed" report.
        """
        with self._lock:
            self._closed = True
            if self._thread.ident is None:
                return
        self._calls.put(None)
        self._thread.join(timeout)
        self._stopping.set()
        self._thread.join(2.0)

    def _work(self) -> None:
        while (queued := self._calls.get()) is not None:
            kind, ranks, call = queued
            start = time.monotonic()
            try:
                if self._stopping.is_set():
                    raise RunError("not begun, because the run has ended")
                report = Report(kind, call(), ranks)
            except DynmoError as error:
                report = Report("failed", str(error), ranks)
            except Exception as error:
                _logger.debug("a call of the manager failed", exc_info=True)
                report = Report("failed", f"{type(error).__name__}: {error}", ranks)
            what = _shorten(" ".join(report.what.split()), 500)
            with self._lock:
                self._reports.append(Report(report.kind, what, ranks, time.monotonic() - start))


_Call = tuple[Literal["released", "started"], int, Callable[[], str]]


class CommandManager(ThreadedManager):
    """Runs a command of the user's own for each release and each request.

    A command gets the environment of rank 0 without a launcher's variables for a rank (`RANK`,
    `MASTER_ADDR` and similar). It also gets these variables:

        DYNMO_LEFT   ranks that left, a JSON list of objects with rank, host, pid and node
        DYNMO_STAY   ranks that stay, likewise
        DYNMO_COUNT  number of further ranks that the run wants (request alone)

    A command may leave processes in the background. The report does not wait for them.
    """

    name = "command"

    def __init__(self, release: Sequence[str], request: Sequence[str], timeout: float) -> None:
        super().__init__("dynmo-command-manager")
        self._release = list(release)
        self._request = list(request)
        self._timeout = timeout

    @property
    def can_request(self) -> bool:
        return bool(self._request)

    def check(self) -> None:
        """Checks that the programs exist."""
        if not self._release:
            raise ConfigError("elastic.release_command is empty: give a program and its arguments")
        for key, command in (
            ("elastic.release_command", self._release),
            ("elastic.grow_command", self._request),
        ):
            if not command or shutil.which(command[0]):
                continue
            if Path(command[0]).is_file():
                raise ConfigError(f"{key}: {command[0]} is not executable: chmod +x {command[0]}")
            raise ConfigError(
                f"{key}: there is no program {command[0]!r}: install it, or give its full path"
            )

    def release(self, left: Sequence[Member], stay: Sequence[Member]) -> None:
        variables = {"DYNMO_LEFT": _as_json(left), "DYNMO_STAY": _as_json(stay)}
        key = "elastic.release_command"
        self._submit("released", len(left), lambda: self._run(key, self._release, variables))

    def request(self, count: int) -> None:
        variables = {"DYNMO_COUNT": str(count)}
        key = "elastic.grow_command"
        self._submit("started", count, lambda: self._run(key, self._request, variables))

    def _run(self, key: str, command: Sequence[str], variables: Mapping[str, str]) -> str:
        if not command:
            raise RunError(f"{key} is empty: give a program and its arguments")
        what = f"{key} ({_shorten(shlex.join(command), 80)})"
        # The output goes to a file, not a pipe. A process in the background may keep it open.
        with tempfile.TemporaryFile() as output:
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=_environment(variables),
                    start_new_session=True,
                )
            except (OSError, ValueError) as error:
                reason = error.strerror if isinstance(error, OSError) else error
                raise RunError(f"{what} cannot start: {reason}; correct {key}") from None
            stopped = self._wait(process)
            line = _last_line(output)
        said = f": {line}" if line else ""
        if stopped:
            raise RunError(f"{what} {stopped}{said}")
        if process.returncode < 0:
            raise RunError(
                f"{what} was ended by {_signal_name(-process.returncode)}{said}; run it by hand"
            )
        if process.returncode:
            raise RunError(f"{what} ended with status {process.returncode}{said}; run it by hand")
        return f"{what}{said}"

    def _wait(self, process: subprocess.Popen[bytes]) -> str:
        """Waits for the command. Returns why its process group was killed, or ""."""
        end = time.monotonic() + self._timeout
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, min(0.2, end - time.monotonic())))
                return ""
            if self._stopping.is_set():
                stopped = "was killed, because the run has ended"
            elif time.monotonic() >= end:
                stopped = f"took over {self._timeout:g} s and was killed; allow it more time"
            else:
                continue
            # The process is not reaped yet, so the number of its group cannot belong to another.
            with contextlib.suppress(PermissionError):  # a process of another user, as under sudo
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
            return stopped


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    inherited = {
        key: value
        for key, value in os.environ.items()
        if key not in _RANK_VARIABLES and not key.startswith("TORCHELASTIC_")
    }
    return {**inherited, **variables}


def _as_json(members: Sequence[Member]) -> str:
    return json.dumps(
        [{"rank": m.rank, "host": m.host, "pid": m.pid, "node": m.node or m.host} for m in members]
    )


def _last_line(output: IO[bytes]) -> str:
    """Returns the last line that is not empty, without control characters."""
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - 4096))
    text = output.read(4096).decode(errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    return _shorten("".join(c for c in lines[-1] if c.isprintable()), 200) if lines else ""


def _shorten(text: str, limit: int) -> str:
    text = text.strip()
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
