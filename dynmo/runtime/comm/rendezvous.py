"""The place where the ranks of a run meet, without torch: the launcher needs none."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynmo.errors import ConfigError

# Most bytes of the file that says where ranks meet.
_MOST = 1 << 16


@dataclass(frozen=True)
class Rendezvous:
    """The place where the ranks of a run find each other.

    Local ranks meet in a folder that only this user can read. Ranks of torchrun and srun meet at an
    address. Ranks that dynmo's launcher started on several machines read its address
    from a file. Without any of the three there is one rank.

    Attributes:
        local: Every rank is on this machine, as torchrun says.
        loopback: The address is the loopback's and every rank is on this machine. Nothing needs
            to be open to the network.
        file: The file into which the launcher writes its address and port.
    """

    rank: int
    size: int
    local_rank: int
    folder: str | None = None
    address: str | None = None
    port: int | None = None
    local: bool = False
    loopback: bool = False
    file: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ConfigError(
                f"rank {self.rank} of {self.size}: ranks count from 0; what the launcher set does "
                "not hold together"
            )


ALONE = Rendezvous(rank=0, size=1, local_rank=0)


def from_environment(environ: Mapping[str, str] = os.environ) -> Rendezvous | None:
    """Reads the world that a launcher started this process in, or None.

    Raises:
        ConfigError: The variables are there but incomplete.
    """

    if "RANK" in environ and "WORLD_SIZE" in environ:
        return _of_launcher(environ)
    # A single interactive Slurm shell also has SLURM_PROCID. Only several tasks are a world to
    # join.
    if (
        "SLURM_PROCID" in environ
        and "SLURM_NTASKS" in environ
        and _number(environ, "SLURM_NTASKS") > 1
    ):
        return _of_slurm(environ)
    return _of_launcher(environ) if "RANK" in environ or "WORLD_SIZE" in environ else None


def _number(environ: Mapping[str, str], key: str) -> int:
    try:
        return int(environ[key])
    except (KeyError, ValueError):
        raise ConfigError(
            f"{key} is {environ.get(key)!r}; the launcher must set it to a number: start the ranks "
            "with torchrun or srun, or unset RANK and WORLD_SIZE"
        ) from None


def _of_launcher(environ: Mapping[str, str]) -> Rendezvous:
    """Reads the variables of torchrun, or of dynmo's own launcher."""
    rank, size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    local = _number(environ, "LOCAL_RANK" if "LOCAL_RANK" in environ else "RANK")
    if "DYNMO_RENDEZVOUS_FILE" in environ:
        return Rendezvous(rank, size, local, file=environ["DYNMO_RENDEZVOUS_FILE"])
    if "DYNMO_RENDEZVOUS" in environ:
        return Rendezvous(rank, size, local, folder=environ["DYNMO_RENDEZVOUS"])
    if "MASTER_ADDR" not in environ:
        raise ConfigError(
            "RANK and WORLD_SIZE are set but MASTER_ADDR is not; start the ranks with "
            "torchrun, or unset RANK"
        )
    address = environ["MASTER_ADDR"]
    # The name alone does not tell. On Kubernetes the first pod may be given "localhost", and the
    # others its name. A literal 127.x address cannot be reached from elsewhere.
    here = environ.get("LOCAL_WORLD_SIZE") == environ["WORLD_SIZE"]
    loopback = is_loopback(address) and (here or address != "localhost")
    port = _number(environ, "MASTER_PORT")
    return Rendezvous(rank, size, local, address=address, port=port, local=here, loopback=loopback)


def _of_slurm(environ: Mapping[str, str]) -> Rendezvous:
    """Reads the variables of srun. The first task's host and a port by job meet."""
    rank, size = _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_NTASKS")
    local = _number(environ, "SLURM_LOCALID")
    address = environ.get("MASTER_ADDR") or first_host(
        environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    )
    # One port per job, the same on every task, away from the registered ones.
    port = (
        _number(environ, "MASTER_PORT")
        if "MASTER_PORT" in environ
        else 20000 + _number(environ, "SLURM_JOB_ID") % 20000
    )
    return Rendezvous(rank, size, local, address=address, port=port, loopback=is_loopback(address))


def is_loopback(address: str) -> bool:
    return address == "localhost" or re.fullmatch(r"127(\.\d+){3}", address) is not None


def first_host(nodelist: str) -> str:
    """Returns the first host of Slurm's list: `gpu[003-006,9],x1` -> `gpu003`."""
    first = re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", nodelist).split(",")[0]
    if not first:
        raise ConfigError(
            "Slurm gave no SLURM_JOB_NODELIST; set MASTER_ADDR to the first task's host"
        )
    return first


def read_rendezvous(path: Path) -> dict[str, Any]:
    """Reads the file with a `rendezvous_record` of a store.

    Raises:
        ConfigError: It is damaged, cannot be read, or comes from another user.
    """
    record: Any = None
    try:
        with path.open("rb") as file:
            _check_source(os.fstat(file.fileno()), path)
            record = json.loads(file.read(_MOST))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except ConfigError:
        raise
    except (ValueError, RecursionError):
        pass
    if not _is_rendezvous_record(record):
        raise ConfigError(
            f"{path} is damaged and does not say where the run meets: nobody can join this run; "
            "stop it, and go on with --resume"
        )
    return record


def _check_source(file: os.stat_result, path: Path) -> None:
    """Raises ConfigError if others could have written a file in a closed folder."""
    folder = path.parent.stat()
    if file.st_uid not in (os.geteuid(), folder.st_uid):
        why = f"belongs to another user ({file.st_uid})"
    elif file.st_mode & ~folder.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        why = "can be written by other users"
    else:
        return
    raise ConfigError(
        f"{path} {why}, so this process does not go where it says; remove it, and start the run "
        "again with --resume"
    )


def _is_rendezvous_record(record: object) -> bool:
    """Returns whether a record has what `open_rendezvous` needs, and nothing else."""
    if not isinstance(record, dict):
        return False
    values: dict[str, Any] = record
    texts = [value for key, value in values.items() if key != "port"]
    if not all(isinstance(text, str) and text and text.isprintable() for text in texts):
        return False
    if values.keys() - {"prefix"} == {"folder"}:
        return Path(values["folder"]).is_absolute()
    port = values.get("port")
    return (
        values.keys() - {"prefix", "token"} == {"address", "port"}
        and type(port) is int
        and 0 < port < 1 << 16
    )
