from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from dynmo.kernels.torch_private import TorchDispatchMode, tree_leaves


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
