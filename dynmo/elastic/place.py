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
    """

    rank: int
    host: str
    pid: int
    node: str = ""
    process: int | None = None

    def __str__(self) -> str:
        return f"{self.node}:{self.pid}"

    def to_text(self) -> str:
        return json.dumps(asdict(self))


def own_place(rank: int) -> RankPlace:
    host, process = socket.gethostname(), os.environ.get("DYNMO_PROCESS", "")
    node = os.environ.get("SLURMD_NODENAME") or os.environ.get("POD_NAME") or host
    return RankPlace(rank, host, os.getpid(), node, int(process) if process.isdigit() else None)


def place_from(text: str) -> RankPlace:
    return RankPlace(**json.loads(text))


def count_text(count: int) -> str:
    return f"{count} more rank{'' if count == 1 else 's'}"
