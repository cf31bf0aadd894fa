"""`dynmo train run.toml` on two hosts of this machine (`benchmarks.faults.hosts`).

    python -m tests.elastic.hosts FIRST SECOND

It runs on the first host, and starts the last rank and all newcomers on the second one. What it
starts there is like `srun`: a process here that stands for one there. A kill does not reach that
one, as if the host was out of reach.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

from benchmarks.faults.hosts import CABLE
from dynmo.cli import main, train
from dynmo.elastic.manager import RankCommand, RankProcess
from dynmo.elastic.managers.local import LocalStarter
from dynmo.pipeline.case import Change, Dynamism, Layers

RANKS = 3
# Files of the run's folder.
IS_UP, HAS_GROWN = "second-host-is-up", "has-grown"
SLOW_FROM = 10


def on_host(name: str, command: Sequence[str]) -> list[str]:
    """Returns the command that runs another one on a host."""
    variables = [f"GLOO_SOCKET_IFNAME={CABLE}", f"SLURMD_NODENAME={name}"]
    return ["ip", "netns", "exec", name, "env", *variables, *command]


class HostStarter(LocalStarter):
    """Starts processes on two hosts. On the second one they wait until it is up."""

    def __init__(self, hosts: Sequence[str]) -> None:
        super().__init__()
        self._hosts = hosts

    def start(self, rank: RankCommand) -> RankProcess:
        first, second = self._hosts
        if rank.process < RANKS - 1:
            return super().start(replace(rank, command=on_host(first, rank.command)))
        # No variable says that the rank dies with its parent.
        there = shlex.join(on_host(second, ["env", "-u", "DYNMO_LAUNCHER", *rank.command]))
        script = f"until [ -e {IS_UP} ]; do sleep 0.1; done; {there} & wait $!"
        return super().start(replace(rank, command=["sh", "-c", script]))


class SlowUntilGrown(Dynamism):
    """Makes steps slow until the run has the second host again, as the test says."""

    name = "slow_until_grown"

    def act(self, step: int, layers: Layers) -> Change | None:
        """See `Dynamism.act`."""
        if step >= SLOW_FROM and not Path(HAS_GROWN).exists():
            time.sleep(0.3)
        return None


def launch(hosts: Sequence[str]) -> int:
    """Runs `dynmo train run.toml` by a launcher of several machines."""
    with mock.patch.object(train, "_starter", return_value=HostStarter(hosts)):
        return main(["train", "run.toml", "--launcher", "slurm"])


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))
