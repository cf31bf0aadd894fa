"""Keeps a frozen prefix's outputs for when the same microbatch comes again.

Source: Egeria, Wang et al. 2022. A rank keeps the output of its last frozen leading layer for a
microbatch. The key is that layer's index and the microbatch's samples. When the microbatch comes
again, these layers do not run. Nothing of this crosses ranks: messages are the same as without a
cache.

    rank 0 | layers 0 1 2 | 3 4 5    frozen: 0 to 4
                   kept ^     ^

    Rank 0 keeps the outputs of 2, rank 1 those of 4. Rank 1 then runs F of layer 5 only.

An output is a function of the key and of the weights up to its layer. It stays valid wherever the
layers in front move, and when more layers freeze behind it. F then goes on from there. It is wrong
once a layer up to it thaws or changes (`forget`). It is useless once its layer is on another rank
(`hold`).

Equal bits: only copies are kept and handed out, so nobody can write to a kept tensor. A layer that
draws random numbers, or that writes to a buffer, gives another output each time. No other rank can
know that, so such a run fails.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable

import torch
from torch import Tensor

from dynmo.extend import ConfigError, FrozenPrefix

Tensors = tuple[Tensor, ...]
Key = tuple[int, bool, Hashable]
"""Layer, whether it trains, and the samples of the microbatch."""


class OutputCache:
    """Outputs of the frozen leading layers of this rank.

    Args:
        limit: Bytes of host memory.

    Attributes:
        bytes: Bytes that it holds.
    """

    # A full cache keeps its entries. Epochs go round, so an evicted entry would be needed sooner
    # than the newest one.

    def __init__(self, limit: int) -> None:
        self._limit, self.bytes = limit, 0
        self._entries: dict[Key, _Kept] = {}

    def run(self, prefix: FrozenPrefix, samples: Hashable | None) -> Tensors:
        """Runs F of the frozen leading layers, as far as it must run.

        Raises:
            ConfigError: A layer does not do the same each time.
        """
        if samples is None:
            outputs = prefix.run(prefix.inputs)
            _check(prefix, kept=False)
            return outputs
        keys = [(layer, prefix.training, samples) for layer in prefix.layers]
        inputs, done = prefix.inputs, prefix.measured
        while done and keys[done - 1] not in self._entries:
            done -= 1
        if done:
            inputs = self._entries[keys[done - 1]].copies(inputs[0].device)
        outputs = prefix.run(inputs, skip=done)
        _check(prefix, kept=True)
        if done < len(keys):
            self._keep(keys, outputs)
        return outputs

    def _keep(self, keys: list[Key], outputs: Tensors) -> None:
        """Keeps the outputs in place of those of the layers in front, if they fit."""
        before = [key for key in keys if key in self._entries]
        freed = sum(self._entries[key].bytes for key in before)
        if self.bytes - freed + _size(outputs) > self._limit:
            return
        self._drop(before)
        kept = self._entries[keys[-1]] = _Kept(outputs)
        self.bytes += kept.bytes

    def forget(self, layers: Iterable[int]) -> None:
        """Drops the outputs of changed layers, on any rank, and of all behind them."""
        first = min(layers, default=None)
        if first is not None:
            self._drop([key for key in self._entries if key[0] >= first])

    def hold(self, layers: Collection[int]) -> None:
        """Drops the outputs of all layers but these, the frozen leading layers here."""
        self._drop([key for key in self._entries if key[0] not in layers])

    def _drop(self, gone: Iterable[Key]) -> None:
        for key in gone:
            self.bytes -= self._entries.pop(key).bytes


class _Kept:
    """Copies in host memory. Only the stream waits for them on CUDA, so it is pinned."""

    def __init__(self, outputs: Tensors) -> None:
        self.bytes = _size(outputs)
        self._ready: torch.cuda.Event | None = None
        if not any(y.is_cuda for y in outputs):
            self.tensors = tuple(y.to("cpu", copy=True) for y in outputs)
            return
        self.tensors = tuple(
            torch.empty_like(y, device="cpu", pin_memory=True).copy_(y, non_blocking=True)
            for y in outputs
        )
        self._ready = torch.cuda.Event()
        self._ready.record()

    def copies(self, device: torch.device) -> Tensors:
        if self._ready is not None:  # the stream may be another by now
            torch.cuda.current_stream(device).wait_event(self._ready)
        return tuple(
            y.to(device, copy=True, non_blocking=self._ready is not None) for y in self.tensors
        )


def _size(tensors: Tensors) -> int:
    """Returns bytes of host memory. torch takes pinned memory in powers of two."""
    return sum(
        1 << (y.nbytes - 1).bit_length() if y.is_cuda and y.nbytes else y.nbytes for y in tensors
    )


def _check(prefix: FrozenPrefix, kept: bool) -> None:
    """Raises ConfigError if a layer does not do the same each time.

    An output that is not kept may be random. No layer may write to buffers: outputs kept from
    evaluations, here or on later ranks, depend on the earlier values.
    """
    if prefix.wrote is not None:
        layer, buffer = prefix.wrote
        wrong = f"{layer} is frozen and its forward writes to its buffer {buffer!r}"
    elif kept and prefix.drew is not None:
        wrong = f"{prefix.drew} is frozen and its forward draws random numbers"
    else:
        return
    raise ConfigError(
        f"{wrong}, so outputs from there on differ each time and cannot be cached; use "
        "dynamism.freezing.cache_bytes = 0 with this model"
    )
