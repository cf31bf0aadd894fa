"""The processes of a run: where each of them runs, as text and for people."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass

from dynmo.errors import RunError


@dataclass(frozen=True)
class Member:
    """The place where one rank runs.

    Attributes:
        node: The resource manager's name of the machine or the pod. The default is `host`.
        process: The launcher's number of this process. None if no launcher of dynmo's started it.
    """

    rank: int
    host: str
    pid: int
    node: str = ""
    process: int | None = None


def own_member(rank: int) -> Member:
    host, process = socket.gethostname(), os.environ.get("DYNMO_PROCESS", "")
    node = os.environ.get("SLURMD_NODENAME") or os.environ.get("POD_NAME") or host
    return Member(rank, host, os.getpid(), node, int(process) if process.isdigit() else None)


def member_text(member: Member) -> str:
    return json.dumps(asdict(member))


def member_from(text: str) -> Member:
    """Reads the text of `member_text`. Raises RunError if it is none."""
    try:
        return Member(**json.loads(text))
    except (ValueError, TypeError):
        raise RunError(
            "the store of the run does not say where each rank runs; has something else written to "
            "it?"
        ) from None


def describe(member: Member) -> str:
    return f"{member.node}:{member.pid}"


def count_text(count: int) -> str:
    return f"{count} more rank{'' if count == 1 else 's'}"
