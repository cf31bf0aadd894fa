"""Forms torch's process groups. Ranks that do not come are named."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from dynmo.errors import RankDied, WaitTimeout
from dynmo.kernels.torch_private import restart_group_names
from dynmo.runtime.comm.error_text import LATE, first_line, ranks_text, reason
from dynmo.runtime.comm.store import await_all, claim, find_missing


def backend_of(enqueues: bool) -> str:
    return "cpu:gloo,cuda:nccl" if enqueues else "gloo"


def form_default_group(
    store: dist.Store, rank: int, size: int, *, backend: str, timeout: float, join_timeout: float
) -> Any:
    # torch._dynamo imports it. Its functions have the default group of that moment as a default
    # argument, and a group that somebody holds does not end: its threads would outlive Python.
    importlib.import_module("torch.distributed.nn.functional")
    limit = timedelta(seconds=timeout)
    claim(store, rank, join_timeout)
    waited = min(join_timeout, timeout)
    try:
        await_all(store, "here", size, waited)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
        # A rank that fails at once and leaves would break the connections that others are still
        # making.
        await_all(store, "joined", size, timeout)
    except RuntimeError as error:
        leave_default_group()
        absent = find_missing(store, [f"here/{other}" for other in range(size)])
        if absent or LATE.search(first_line(error)):
            late = f"rank {rank} waited {waited:g} s for {ranks_text(absent)} to join"
            raise WaitTimeout(f"{late}; started with too few ranks?", absent) from None
        # All came, and one is gone again.
        raise RankDied(f"rank {rank} could not form a group of {size}: {reason(error)}") from None
    return dist.group.WORLD


def form_group_within(ranks: Sequence[int], *, backend: str, timeout: float) -> Any:
    """Makes a group within a program's own process groups. Only these ranks call it."""
    rank = ranks.index(dist.get_rank())
    what = f"ranks {', '.join(map(str, ranks))} of the process group"
    try:
        return new_group(ranks, timeout, backend, len(ranks))
    except RuntimeError as error:
        if LATE.search(first_line(error)):
            raise WaitTimeout(
                f"rank {rank} waited {timeout:g} s for {what} to call dynmo.init"
            ) from None
        raise RankDied(f"rank {rank} could not form a group of {what}: {reason(error)}") from None


def new_group(ranks: Sequence[int], timeout: float, backend: str | None, callers: int) -> Any:
    # torch names a group by a count that all ranks share. Or it takes the group's ranks and a count
    # of this rank's groups.
    own_name = callers < dist.get_world_size()
    return dist.new_group(
        list(ranks), timedelta(seconds=timeout), backend, use_local_synchronization=own_name
    )


def leave_default_group() -> None:
    """Ends the default group, if there is one.

    torch names groups by a count, which must be the same on all ranks when they meet again. The
    count does not start anew when a group could not be formed.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    restart_group_names()
