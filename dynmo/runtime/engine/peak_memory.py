"""The most memory that this process held since a moment."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import torch

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def restart_peak(device: torch.device) -> None:
    """Begins a measurement."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):  # the peak is then that since the process started
        _RESET.write_text("5")


def peak_bytes(device: torch.device) -> int:
    """Returns the peak since `restart_peak`.

    It is what torch's allocator has given out on CUDA, and the resident memory of the process on
    CPU. 0 if the system does not tell it.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError):
        found = re.search(r"^VmHWM:\s*(\d+) kB", _STATUS.read_text(), re.MULTILINE)
        return int(found[1]) * 1024 if found else 0
    return 0
