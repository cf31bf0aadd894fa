"""A run of one rank on a device."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.comm.signed_store import SignedStore
from tests.jobs import train


def trained(device: torch.device, config: dict[str, Any]) -> dict[str, Any]:
    """The losses and the digest of a run whose world has a process group."""
    with tempfile.TemporaryDirectory() as folder:
        world = Meeting.join(
            SignedStore(dist.FileStore(str(Path(folder) / "store"), 1)), 0, 1, device=device
        )
        try:
            return train(world, config)
        finally:
            world.close()
