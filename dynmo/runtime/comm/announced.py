"""A bound on the memory that a rank makes ready because a peer says so."""

from __future__ import annotations

import os

import torch

from dynmo.errors import RunError


def check_announced(size: int, device: torch.device, what: str) -> None:
    """Refuse a size that was damaged on its way, before any memory is asked for.

    Args:
        size: Bytes that a peer announces.
        device: Device that is to hold the memory.
        what: Name of what is announced and by whom, for an error.

    Raises:
        RunError: The size is negative, or more than the device or this machine has.
    """
    if device.type == "cuda":
        room = torch.cuda.get_device_properties(device).total_memory
    else:
        room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if not 0 <= size <= room:
        problem = f"{size} bytes, of which {room} at most can be allocated here"
        raise RunError(f"{what}: it announces {problem}; do all ranks run the same dynmo?")
