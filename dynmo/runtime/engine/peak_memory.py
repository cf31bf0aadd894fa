"""The most memory that this process held since a moment, or that ops would hold."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dynmo.kernels.torch_private import TorchDispatchMode, tree_leaves

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


class Watch(TorchDispatchMode):
    """Counts bytes of tensors that ops make while it watches, and their maximum.

    A tensor that it has seen made counts until it is gone, even while it does not watch. Use it for
    shapes only: torch may compute differently under it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self._peak = 0
        self._known: set[int] = set()

    def restart(self) -> int:
        """Starts the maximum anew. Returns the bytes that are alive."""
        self._peak = self.live
        return self.live

    def excess(self, over: int) -> int:
        return self._peak - over

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {_key(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for tensor in tree_leaves(out):
            # A view, or a tensor that was changed in place, is nothing new.
            if isinstance(tensor, Tensor) and _key(tensor) not in given | self._known:
                self._count(tensor)
        self._peak = max(self._peak, self.live)
        return out

    def _count(self, tensor: Tensor) -> None:
        storage, key = tensor.untyped_storage(), _key(tensor)
        self._known.add(key)
        self.live += storage.nbytes()
        weakref.finalize(storage, self._gone, key, storage.nbytes()).atexit = False

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
