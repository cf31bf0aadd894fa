"""Starts ranks as processes of this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from dynmo.elastic.manager import RankCommand, RankProcess
from dynmo.signals import SAVE_SIGNAL, STOP_SIGNALS


class LocalProcess(subprocess.Popen[bytes]):
    def reason(self) -> str:
        return ""


class LocalStarter:
    """Starts child processes.

    A newcomer gets the lowest local rank that no living process has.
    """

    def __init__(self) -> None:
        self._by_local_rank: dict[int, LocalProcess] = {}

    def start(self, rank: RankCommand) -> RankProcess:
        # A terminal sends Ctrl-C to all processes. The process inherits the blocked signals, so
        # none breaks into its imports. `enter_rank` unblocks them.
        blocked = (*STOP_SIGNALS, SAVE_SIGNAL)
        signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        try:
            taken = {at for at, process in self._by_local_rank.items() if process.poll() is None}
            free = next(at for at in range(len(taken) + 1) if at not in taken)
            local_rank = free if rank.joins else rank.process
            env = {**rank.environment, **local_environment(), "LOCAL_RANK": str(local_rank)}
            with contextlib.nullcontext() if rank.log is None else rank.log.open("ab") as out:
                process = LocalProcess(
                    rank.command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env
                )
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)
        self._by_local_rank[local_rank] = process
        return process

    def ranks_left(self, size: int) -> int:
        return size

    def give_back(self, processes: Sequence[RankProcess]) -> str:
        count = len(processes)
        what = "1 process" if count == 1 else f"{count} processes"
        return f"{what} of this machine ended; memory and device are free"


def local_environment() -> dict[str, str]:
    """Returns the further variables of a process on the launcher's own machine."""
    env = {"DYNMO_LAUNCHER": str(os.getpid())}
    if sys.platform == "linux":
        env["GLOO_SOCKET_IFNAME"] = "lo"
    return env
