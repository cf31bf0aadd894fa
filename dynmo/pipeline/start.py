"""`init`: joins the ranks that a launcher started, or makes a world of one."""

from __future__ import annotations

import os

import torch

from dynmo.errors import ConfigError
from dynmo.runtime.comm.launch import FOR_RANKS_ON_CUDA
from dynmo.runtime.comm.rendezvous import ALONE, from_environment
from dynmo.runtime.comm.store import open_store
from dynmo.runtime.comm.world import World


def init(*, device: str | torch.device = "auto", timeout: float = 120.0) -> World:
    """Joins the ranks that torchrun, Slurm or dynmo's launcher started. Without a launcher the world has one rank.

    Use it as a context manager, or call `close` at the end.

    Args:
        device: Where this rank computes. "auto" is the CUDA device of the local rank if there is
            one, and the CPU otherwise.
        timeout: Seconds that a rank waits for another, at the start and in every message.

    Returns:
        The world. It knows `rank`, `size` and `device`.

    Raises:
        ConfigError: The launcher's variables are incomplete, or there is no such device.
        WaitTimeout: A rank did not come. The message names it.

    Example:
        >>> with init(device="cpu") as world:
        ...     (world.rank, world.size)
        (0, 1)
    """
    place = from_environment() or ALONE
    if device == "auto":
        device = torch.device("cuda", place.local_rank) if torch.cuda.is_available() else torch.device("cpu")
    device = torch.device(device)
    if device.type == "cuda":
        for name, value in {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **(FOR_RANKS_ON_CUDA if place.size > 1 else {})}.items():
            os.environ.setdefault(name, value)
        if not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
            raise ConfigError(f"device = {str(device)!r}, but torch sees {torch.cuda.device_count()} CUDA devices; use 'auto' or 'cpu'")
        torch.cuda.set_device(device)
    return World.join(open_store(place, timeout), place.rank, place.size, device=device, timeout=timeout)
