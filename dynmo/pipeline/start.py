"""`init` makes the world of ranks.

It joins the ranks that a launcher started, takes those of a process group, or makes a world of one
rank.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dynmo.counterparts import names_checked
from dynmo.elastic.launcher.environment import end_process, prepare_cuda
from dynmo.errors import ConfigError, DynmoError, place
from dynmo.files import write_whole
from dynmo.pipeline.options import Backend, WorldOptions
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.comm.rendezvous import ALONE, from_environment
from dynmo.runtime.comm.store import open_store, rendezvous_record

_logger = logging.getLogger(__name__)

_DEFAULT = WorldOptions()


class World(Protocol):
    """The ranks that train together. `init` makes it.

    Use it as a context manager, or call `close` at the end.

    Attributes:
        rank: Number of this rank.
        size: Number of ranks.
        device: Device of this rank.

    Example:
        >>> with init(device="cpu") as world:
        ...     (world.rank, world.size, world.device.type)
        (0, 1, 'cpu')
    """

    rank: int
    size: int
    device: torch.device

    def close(self, failed: bool = False) -> None:
        """Leaves the world, and frees its process groups.

        Args:
            failed: Whether this rank gives up. The others are then not waited for.
        """
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None: ...


@names_checked
def init(
    group: dist.ProcessGroup | DeviceMesh | None = None,
    *,
    device: str | torch.device = _DEFAULT.device,
    backend: Backend = _DEFAULT.backend,
    timeout: float = _DEFAULT.timeout,
    work_timeout: float = _DEFAULT.work_timeout,
    threads: int = _DEFAULT.threads,
    rendezvous: str | Path | None = None,
    join: bool = False,
) -> World:
    """Joins the ranks that torchrun, Slurm or dynmo's launcher started.

    Without a launcher the world has one rank.

    Use it as a context manager, or call `close` at the end. The same processes may then call `init`
    again, all of them equally often. A program that has called
    `torch.distributed.init_process_group` keeps its process groups: dynmo makes groups of its own
    and closes only these.

    Args:
        group: The ranks of the world, in a program with process groups of its own. None takes all
            ranks. Only the ranks of the group call `init`. A `DeviceMesh` of two dimensions is
            (pipeline, replicas); pass its second size as `replicas` to `dynmo.Pipeline`.
        device: Device of this rank. "auto" is the CUDA device of the local rank if there is
            one, and the CPU otherwise.
        backend: "auto" is NCCL between CUDA ranks and gloo between CPU ranks. "gloo" sends through
            host memory, which is slower but lets ranks share a GPU.
        timeout: Seconds after which a rank that gives no sign of life is dead, and ranks that only
            wait for one another end.
        work_timeout: Seconds of work without progress after which the other ranks give a rank up.
            Limit of all waits until the first step is done.
        threads: Threads of one rank on CPU. `World.close` restores torch's number. Another number
            of threads gives other last bits, so it is the same on all ranks.
        rendezvous: File through which processes that start later find this training. Rank 0 writes
            it. All machines of the training see it, and only this user can read it.
        join: Whether this process joins the training whose rank 0 wrote `rendezvous`. Its pipeline
            has `left` until `Pipeline.join`.

    Returns:
        The world. It knows `rank`, `size` and `device`.

    Raises:
        ConfigError: The launcher's variables are incomplete, there is no such device, the group is
            not this rank's, or the ranks have different numbers of threads.
        WaitTimeout: A rank did not come. The message names it.

    Example:
        >>> with init(device="cpu") as world:
        ...     (world.rank, world.size)
        (0, 1)
    """
    options = WorldOptions(
        threads=threads, timeout=timeout, work_timeout=work_timeout, backend=backend
    )
    ranks = _ranks_of(group)
    found = from_environment() or ALONE
    if device == "auto":
        device = (
            torch.device("cuda", found.local_rank)
            if torch.cuda.is_available()
            else torch.device("cpu")
        )
    device = torch.device(device)
    if options.staged and device.type == "cuda" and torch.cuda.is_available():
        device = torch.device("cuda", (device.index or 0) % torch.cuda.device_count())
    if device.type == "cuda":
        prepare_cuda(2 if join else found.size)
        _use_cuda(device)
    if join:
        from dynmo.elastic.newcomer import outside_world

        if rendezvous is None:
            raise ConfigError("join=True needs the file that rank 0 wrote: rendezvous=FILE")
        world = outside_world(
            Path(rendezvous),
            device=device,
            timeout=timeout,
            work_timeout=work_timeout,
            staged=options.staged,
        )
        world.take_threads(threads)
        return _closed_at_exit(world)
    if ranks is not None:
        world = Meeting.adopt(
            ranks,
            device=device,
            timeout=timeout,
            staged=options.staged,
            work_timeout=work_timeout,
        )
    else:
        world = Meeting.join(
            open_store(found, timeout),
            found.rank,
            found.size,
            device=device,
            timeout=timeout,
            staged=options.staged,
            work_timeout=work_timeout,
        )
    _take_threads(world, threads)
    if rendezvous is not None and world.rank == 0:
        if ranks is not None:
            raise ConfigError(
                "rendezvous is set, but ranks of a program's own process groups cannot become "
                "others"
            )
        write_whole(Path(rendezvous), json.dumps(rendezvous_record(found)), mode=0o600)
        atexit.register(Path(rendezvous).unlink, missing_ok=True)
    return _closed_at_exit(world)


def _closed_at_exit(world: Meeting) -> Meeting:
    world.is_of_loop = True
    atexit.register(world.close, failed=True)
    report_uncaught(world)
    return world


def _take_threads(world: Meeting, threads: int) -> None:
    try:
        what = "all ranks to compare their threads"
        of = world.gather(torch.tensor(threads), what).tolist()
        if len(set(of)) > 1:
            ranks = {
                n: [rank for rank in range(world.size) if of[rank] == n] for n in sorted(set(of))
            }
            each = ", ".join(f"{n} on {world.name_ranks(ranks[n])}" for n in ranks)
            raise ConfigError(
                f"threads = {each}; give dynmo.init one number of threads on all ranks, so that "
                "they compute the same bits"
            )
    except BaseException:
        world.close(failed=True)
        raise
    before = world.take_threads(threads)
    if world.rank == 0 and before != threads:
        _logger.warning(
            f"dynmo: threads = {threads} on each rank until the world closes, instead of {before}; "
            "dynmo.init(threads=...) sets another number"
        )


def _use_cuda(device: torch.device) -> None:
    if not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device = {str(device)!r}, but torch sees {torch.cuda.device_count()} CUDA "
            "devices; use 'auto' or 'cpu'"
        )
    torch.cuda.set_device(device)


def _ranks_of(group: dist.ProcessGroup | DeviceMesh | None) -> list[int] | None:
    """Returns a group's or mesh's ranks in torch's default group.

    Returns None if the program has no process group.
    """
    if not dist.is_initialized():
        if group is not None:
            raise ConfigError(
                "dynmo.init was given a process group, but torch.distributed is not initialized"
            )
        return None
    if group is None:
        return list(range(dist.get_world_size()))
    ranks: list[int]
    if isinstance(group, DeviceMesh):
        ranks = group.mesh.flatten().tolist()
        if group.ndim > 2 or ranks != sorted(ranks):
            raise ConfigError(
                f"dynmo.init was given a mesh of shape {tuple(group.shape)} with ranks {ranks}; "
                "it needs one dimension (pipeline) or two"
                " (pipeline, replicas), with ranks in ascending order"
            )
    else:
        ranks = sorted(dist.get_process_group_ranks(group)) if dist.get_rank(group) >= 0 else []
    if dist.get_rank() not in ranks:
        raise ConfigError(
            f"rank {dist.get_rank()} called dynmo.init with a process group that it is not in; "
            "only its ranks may call"
        )
    return ranks


# -- the end of a program after an exception that nobody caught ---


def report_uncaught(world: World) -> None:
    """Has this process end in one line after Ctrl-C or an error of dynmo.

    Other errors keep their traceback, and with DYNMO_TRACEBACK=1 all do. The process ends without
    finalization, as `dynmo train` does. In an interactive shell it goes on.
    """
    before, name = sys.excepthook, f"[rank{world.rank}]"
    if world.size == 1:
        return

    def report(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        status, line = 1, None
        if isinstance(error, KeyboardInterrupt):
            status, line = 130, "interrupted"
        elif isinstance(error, DynmoError):
            status, line = error.exit_status, f"{type(error).__name__}: {error}"
        if line is None or os.environ.get("DYNMO_TRACEBACK") == "1":
            before(kind, error, traceback)
        else:
            text = " ".join(f"{line}{place(error)}".split())
            print(f"{name}: {text}\n", end="", file=sys.stderr, flush=True)  # in one piece
        if not hasattr(sys, "ps1") and not sys.flags.interactive:
            _end(status)

    sys.excepthook = report


def _end(status: int) -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # torchrun sends it once more
    _end_threads()
    end_process(status)


def _end_threads() -> None:
    """Waits for threads as Python does at its end: idle workers of an executor are told to end."""
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
