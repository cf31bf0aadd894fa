"""Gives ranks back, and asks for others, by commands of the user's own.

    give_back(left, stay)   DYNMO_LEFT='[{"rank": 3, ...}]' DYNMO_STAY='[...]' give-back.sh
    start(2)                DYNMO_COUNT=2 start-ranks.sh

The commands run one after another, beside the training. The last line of their output becomes part
of the report.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from typing import IO

from dynmo.elastic.manager import RankPlace
from dynmo.elastic.managers.threaded import ThreadedManager, ending, shorten
from dynmo.errors import ConfigError, RunError, one_line

# A command that starts ranks must not pass these on, because they name a rank of this run.
_RANK_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DYNMO_RENDEZVOUS"),
    *("DYNMO_RENDEZVOUS_FILE", "DYNMO_PROCESS", "DYNMO_LAUNCHER", "DYNMO_LAUNCHER_NODE"),
)
_GIVE_BACK, _START = "elastic.release_command", "elastic.grow_command"


class CommandManager(ThreadedManager):
    """Runs a command of the user's own for each `give_back` and each `start`.

    A command gets the environment of rank 0 without a launcher's variables for a rank (`RANK`,
    `MASTER_ADDR` and similar). It also gets these variables:

        DYNMO_LEFT   ranks that left, a JSON list of objects with rank, host, pid and node
        DYNMO_STAY   ranks that stay, likewise
        DYNMO_COUNT  number of further ranks that the run wants (`start` alone)

    A command may leave processes in the background. The report does not wait for them.
    """

    name = "command"

    def __init__(self, give_back: Sequence[str], start: Sequence[str], timeout: float) -> None:
        super().__init__()
        self._commands = {_GIVE_BACK: list(give_back), _START: list(start)}
        self._timeout = timeout

    @property
    def can_start(self) -> bool:
        return bool(self._commands[_START])

    def check(self) -> None:
        """Checks that the programs exist."""
        if not self._commands[_GIVE_BACK]:
            raise ConfigError(f"{_GIVE_BACK} is empty: give a program and its arguments")
        for key, command in self._commands.items():
            if command and not shutil.which(command[0]):
                raise ConfigError(
                    f"{key}: there is no program {command[0]!r}: give its full path, or make it "
                    "executable"
                )

    def start(self, count: int) -> None:
        self.submit("started", count, lambda: self._run(_START, DYNMO_COUNT=str(count)))

    def give_back(self, left: Sequence[RankPlace], stay: Sequence[RankPlace]) -> None:
        variables = {"DYNMO_LEFT": _as_json(left), "DYNMO_STAY": _as_json(stay)}
        self.submit("released", len(left), lambda: self._run(_GIVE_BACK, **variables))

    def _run(self, key: str, **variables: str) -> str:
        command = self._commands[key]
        what = f"{key} ({shorten(shlex.join(command), 80)})"
        # The output goes to a file, not a pipe. A process in the background may keep it open.
        with tempfile.TemporaryFile() as output:
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=_own_environment() | variables,
                    start_new_session=True,
                )
            except (OSError, ValueError) as error:
                raise RunError(f"{what} cannot start: {error}; correct {key}") from None
            stopped = self._wait(process)
            line = _last_line(output)
        said, code = f": {line}" if line else "", process.returncode
        if stopped:
            raise RunError(f"{what} {stopped}{said}")
        if code:
            raise RunError(f"{what} {ending(code)}{said}; run it by hand")
        return f"{what}{said}"

    def _wait(self, process: subprocess.Popen[bytes]) -> str:
        """Waits for the command. Returns why its process group was killed, or ""."""
        end = time.monotonic() + self._timeout
        while time.monotonic() < end and not self._stopping.wait(0.05):
            if process.poll() is not None:
                return ""
        # The process is not reaped yet, so the number of its group cannot belong to another.
        with contextlib.suppress(PermissionError):  # a process of another user, as under sudo
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
        if self._stopping.is_set():
            return "was killed, because the run has ended"
        return f"took over {self._timeout:g} s and was killed; allow it more time"


def _own_environment() -> dict[str, str]:
    return {
        key: value
        for key, value in os.environ.items()
        if key not in _RANK_VARIABLES and not key.startswith("TORCHELASTIC_")
    }


def _as_json(places: Sequence[RankPlace]) -> str:
    return json.dumps(
        [{"rank": p.rank, "host": p.host, "pid": p.pid, "node": p.node or p.host} for p in places]
    )


def _last_line(output: IO[bytes]) -> str:
    """Returns the last line that is not empty, without control characters."""
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - 4096))
    lines = output.read(4096).decode(errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "")
    return shorten(one_line(last))
