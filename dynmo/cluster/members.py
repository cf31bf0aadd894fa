"""The processes of a run: where each of them runs, as text and for people."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict

from dynmo.cluster.launch_folder import launch_folder
from dynmo.cluster.releaser import Member
from dynmo.errors import RunError


def own_member(rank: int) -> Member:
    """Returns the place where this process runs.

    Args:
        rank: Number of this process.
    """
    host, process = socket.gethostname(), os.environ.get("DYNMO_PROCESS", "")
    node = os.environ.get("SLURMD_NODENAME") or os.environ.get("POD_NAME") or host
    return Member(rank, host, os.getpid(), node, int(process) if process.isdigit() else None)


def member_text(member: Member) -> str:
    """Returns a member as text for the other ranks."""
    return json.dumps(asdict(member))


def member_from(text: str) -> Member:
    """Reads the text of `member_text`.

    Raises:
        RunError: It is none.
    """
    try:
        return Member(**json.loads(text))
    except (ValueError, TypeError):
        raise RunError(
            "the store of the run does not say where each rank runs; has something else written to "
            "it?"
        ) from None


def describe(member: Member) -> str:
    """Returns the name of a process for a person."""
    return f"{member.node}:{member.pid}"


def count_text(count: int) -> str:
    """Returns a number of ranks in words."""
    return f"{count} more rank{'' if count == 1 else 's'}"


def tell_launcher(left: Sequence[Member], generation: int) -> None:
    """Tells dynmo's launcher, if it started these processes, that they are no ranks any more.

    Args:
        left: Ranks that are out of the run.
        generation: Number of the meeting that is the first without them.
    """
    launcher = launch_folder()
    for member in left:
        if launcher is not None and member.process is not None:
            # On a full disk the end of such a process must be a good one.
            with contextlib.suppress(OSError):
                launcher.leave(member.process, generation)
