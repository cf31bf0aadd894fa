"""Where the ranks of a run find each other, read from what the launcher set. No torch here: the launcher itself needs none."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from dynmo.errors import ConfigError


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of a run find each other: a folder that only this user can read (local ranks), or an address (torchrun, Slurm)."""

    rank: int
    size: int
    local_rank: int
    folder: str | None = None
    address: str | None = None
    port: int | None = None


def from_environment(environ: Mapping[str, str] = os.environ) -> Rendezvous | None:
    """The world this process was started in: dynmo's own, torchrun's or Slurm's; None when it was started alone.

    Raises ConfigError when the variables are there but incomplete.
    """

    def number(key: str) -> int:
        try:
            return int(environ[key])
        except (KeyError, ValueError):
            raise ConfigError(f"{key} is {environ.get(key)!r}; the launcher must set it to a number") from None

    if "RANK" in environ and "WORLD_SIZE" in environ:
        rank, size, local = number("RANK"), number("WORLD_SIZE"), int(environ.get("LOCAL_RANK", environ["RANK"]))
        if "DYNMO_RENDEZVOUS" in environ:
            return Rendezvous(rank, size, local, folder=environ["DYNMO_RENDEZVOUS"])
        if "MASTER_ADDR" not in environ:
            raise ConfigError("RANK and WORLD_SIZE are set but MASTER_ADDR is not; start the ranks with torchrun, or unset RANK")
        return Rendezvous(rank, size, local, address=environ["MASTER_ADDR"], port=number("MASTER_PORT"))
    # A single interactive Slurm shell also has SLURM_PROCID; only several tasks are a world to join.
    if "SLURM_PROCID" in environ and int(environ.get("SLURM_NTASKS", "1")) > 1:
        rank, size, local = number("SLURM_PROCID"), number("SLURM_NTASKS"), number("SLURM_LOCALID")
        address = environ.get("MASTER_ADDR") or first_host(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", ""))
        # One port per job, the same on every task, away from the registered ones.
        port = int(environ.get("MASTER_PORT", 20000 + number("SLURM_JOB_ID") % 20000))
        return Rendezvous(rank, size, local, address=address, port=port)
    return None


def first_host(nodelist: str) -> str:
    """The first host of Slurm's compressed list: `gpu[003-006,9],x1` -> `gpu003`."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", nodelist)
    if match is None:
        raise ConfigError("Slurm gave no SLURM_JOB_NODELIST; set MASTER_ADDR to the first task's host")
    return match[1] + (match[2] or "") + (match[3] or "")
