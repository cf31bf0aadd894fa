"""The place where a rank runs, as text and for people."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class RankPlace:
    """The process of one rank.

    Attributes:
        node: The resource manager's name of the machine or the pod. The default is `host`.
        process: The launcher's number of this process. None if no launcher of dynmo's started it.
        stays: Whether the run keeps this machine to the last, because its store ends with it.
    """

    rank: int
    host: str
    pid: int
    node: str = ""
    process: int | None = None
    stays: bool = False

    def __str__(self) -> str:
        return f"{self.node}:{self.pid}"

    def to_text(self) -> str:
        return json.dumps(asdict(self))


def own_node() -> str:
    named = os.environ.get("SLURMD_NODENAME") or os.environ.get("POD_NAME")
    return named or socket.gethostname()


def own_place(rank: int) -> RankPlace:
    process, node = os.environ.get("DYNMO_PROCESS", ""), own_node()
    number = int(process) if process.isdigit() else None
    # dynmo's launcher serves the store. Elsewhere rank 0 does, or torchrun's agent beside it.
    launcher = os.environ.get("DYNMO_LAUNCHER_NODE")
    stays = rank == 0 if launcher is None else node == launcher
    return RankPlace(rank, socket.gethostname(), os.getpid(), node, number, stays)


def place_from(text: str) -> RankPlace:
    return RankPlace(**json.loads(text))


def count_text(count: int) -> str:
    return f"{count} more rank{'' if count == 1 else 's'}"
