"""A run whose ranks leave and are killed before their processes have ended.

    python -m tests.elastic.launcher.kill_leavers FOLDER CYCLES SEED

In each cycle one of three ranks leaves, and another joins. The last line has the number of kills
and the status of the run. The processes are forked from this one, because an import of torch would
take most of the time.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch  # noqa: F401  (the forked processes have it)

import dynmo.train.joining
import dynmo.train.run  # noqa: F401
from dynmo.cli import main
from dynmo.config import parse
from dynmo.elastic.launch_folder import LaunchFolder
from dynmo.elastic.launcher.ending import end_process
from dynmo.elastic.launcher.supervisor import spawn
from dynmo.elastic.manager import RankCommand, RankProcess
from dynmo.elastic.managers.local import local_environment
from tests.jobs import SOURCE

STEPS = 4
# Most seconds from the moment in which a rank has left until it is killed. Its process would end
# after some 0.02 to 0.15 s.
LATEST = 0.08


class Fork:
    """A process that was forked from this one."""

    def __init__(self, rank: RankCommand) -> None:
        self._code: int | None = None
        self._polling = threading.Lock()  # two threads poll
        environment = {**rank.environment, **local_environment()}
        self.pid = os.fork()
        if not self.pid:
            os.environ.update(environment)
            if rank.log is not None:
                with rank.log.open("ab") as log:
                    os.dup2(log.fileno(), 1)
                    os.dup2(log.fileno(), 2)
            end_process(main(rank.command))

    def poll(self) -> int | None:
        with self._polling:
            if self._code is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self._code = os.waitstatus_to_exitcode(status) if pid else None
            return self._code

    def send_signal(self, sig: int, /) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(0.01)
        return code

    def reason(self) -> str:
        return ""


class ForkStarter:
    """Forks ranks, and kills each of them soon after it has left.

    Args:
        folder: The launch folder.
        seed: Seed of the delays.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder, self._random = LaunchFolder(folder), random.Random(seed)
        self._forks: dict[int, Fork] = {}
        self.killed = 0
        threading.Thread(target=self._kill, daemon=True).start()

    def start(self, rank: RankCommand) -> RankProcess:
        self._forks[rank.process] = Fork(rank)
        return self._forks[rank.process]

    def released(self, processes: Sequence[RankProcess]) -> str:
        return "released"

    def close(self) -> None:
        pass

    def _kill(self) -> None:
        seen = set[str]()
        while True:
            time.sleep(0.002)
            names = set[str]()
            with contextlib.suppress(OSError):
                names = self._folder.names() - seen
            for name in names:
                if not name.startswith("left-"):
                    continue
                time.sleep(self._random.uniform(0, LATEST))
                fork = self._forks[int(name.split("-")[1])]
                fork.kill()
                self.killed += fork.wait() == -signal.SIGKILL
            seen |= names


def run(folder: Path, cycles: int, seed: int) -> int:
    shapes = [
        shape
        for start in range(STEPS, 2 * STEPS * cycles, 2 * STEPS)
        for shape in ([start, 2, 1], [start + STEPS, 3, 1])
    ]
    config = {
        "name": "run",
        "model": {"kind": "emulated", "layers": 6, "f": 0, "b": 0, "w": 0},
        "train": {"steps": STEPS * (2 * cycles + 1), "global_batch": 4, "micro_batch": 2},
        "parallel": {"pipeline": 3, "timeout": 60.0},
        "data": {"source": SOURCE},
        "balance": {"balancer": "none"},
        "elastic": {"reshape_at": shapes, "join_timeout": 45.0},
    }
    (folder / "config.toml").write_text(parse(config).to_toml())
    launch = folder / ".launch"
    starter = ForkStarter(launch, seed)
    status = spawn(["train", str(folder / "config.toml"), "--json"], 3, 1, folder, starter, launch)
    print(json.dumps({"killed": starter.killed, "status": status}))
    return status


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
