"""Keeps a frozen prefix's outputs for when the same microbatch comes again.

Source: Egeria, Wang et al. 2022. A rank keeps the output of its last frozen leading layer for a
microbatch. The key is that layer's index and the microbatch's key. When the microbatch comes again,
these layers do not run. Nothing of this crosses ranks: messages are the same as without a cache.

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

from collections.abc import Collection, Hashable, Iterable, Sequence

import torch

from dynmo.errors import RunError
from dynmo.runtime.comm.clock import Clock
from dynmo.runtime.layer.split_backward import Layer, Tensors

Keys = Sequence[Hashable]
"""Key of each microbatch of a run. Keys are equal only if the inputs of the first stage are."""


class OutputCache:
    """Outputs of the frozen leading layers of this rank.

    Args:
        limit: Bytes of host memory. 0: nothing is kept.

    Attributes:
        spared: Number of F's of layers that did not have to run.
    """

    # A full cache keeps its entries. Epochs go round, so an evicted entry would be needed sooner
    # than the newest one.

    def __init__(self, limit: int, clock: Clock) -> None:
        self.limit, self._clock = limit, clock
        self.bytes = self.spared = 0
        self._entries: dict[tuple[int, Hashable], _Kept] = {}
        self._keys: Keys | None = None

    def begin(self, keys: Keys | None, training: bool) -> None:
        """Prepares for a run. `keys` is None if the microbatches do not come again."""
        self._keys = None if keys is None else [(training, key) for key in keys]

    def forward(
        self, layers: Sequence[Layer], microbatch: int, inputs: Tensors, step: int
    ) -> Tensors:
        """Runs F of the stage's frozen leading layers, as far as it must run.

        Raises:
            RunError: A layer does not do the same each time.
        """
        key = None if self._keys is None else self._keys[microbatch]
        done, tensors = 0, inputs
        if key is not None:
            start = self._clock.mark()
            done, entry = self._find(layers, key)
            if entry is not None:
                tensors = entry.copies(inputs[0].device)
                self.spared += done
                self._mark(layers[:done], start)
        for layer in layers[done:]:
            tensors = _forward(layer, microbatch, tensors, step, drawing=key is None)
        if key is not None and done < len(layers):
            self._keep(layers, key, tensors)
        return tensors

    def _find(self, layers: Sequence[Layer], key: Hashable) -> tuple[int, _Kept | None]:
        """Returns how many layers need not run, and the output of the last of these.

        A layer runs if its sizes are not known yet, because it has just come.
        """
        known = next((i for i, layer in enumerate(layers) if not layer.output_bytes), len(layers))
        for count in range(known, 0, -1):
            entry = self._entries.get((layers[count - 1].index, key))
            if entry is not None:
                return count, entry
        return 0, None

    def _mark(self, spared: Sequence[Layer], start: object) -> None:
        """Leaves marks for the profiler: the last F is the copy, the others take no time."""
        end = self._clock.mark()
        for layer in spared[:-1]:
            layer.spare(start, start)
        spared[-1].spare(start, end)

    def _keep(self, layers: Sequence[Layer], key: Hashable, outputs: Tensors) -> None:
        """Keeps the outputs in place of those of the layers in front, if they fit."""
        before = [at for layer in layers if (at := (layer.index, key)) in self._entries]
        freed = sum(self._entries[at].bytes for at in before)
        if self.bytes - freed + _size(outputs) > self.limit:
            return
        self._drop(before)
        kept = self._entries[layers[-1].index, key] = _Kept(outputs)
        self.bytes += kept.bytes

    # -- entries that hold no longer ---------------------------------------------------------------

    def forget(self, layers: Iterable[int]) -> None:
        """Drops the outputs of changed layers, on any rank, and of all behind them."""
        first = min(layers, default=None)
        if first is not None:
            self._drop([at for at in self._entries if at[0] >= first])

    def hold(self, layers: Collection[int]) -> None:
        """Drops the outputs of all layers but these, the frozen leading layers here."""
        self._drop([at for at in self._entries if at[0] not in layers])

    def _drop(self, gone: Iterable[tuple[int, Hashable]]) -> None:
        for at in gone:
            self.bytes -= self._entries.pop(at).bytes


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


def _forward(layer: Layer, microbatch: int, inputs: Tensors, step: int, drawing: bool) -> Tensors:
    """Runs F of one layer, and checks that it does the same each time.

    `drawing` permits random numbers, for an output that is not kept. The layer may never write to
    buffers. Outputs kept from evaluations, here or on later ranks, depend on the earlier values.
    """
    before = layer.buffers.copies()
    outputs = layer.forward(microbatch, inputs, step, False, False, None)
    wrong = (
        None
        if drawing or not layer.drew(microbatch, inputs[0].device, step)
        else "draws random numbers"
    )
    written = next(iter(layer.buffers.written(before)), None)
    if written is not None:
        wrong = f"writes to its buffer {layer.buffers.name_of(written)!r}"
    if wrong is not None:
        raise RunError(
            f"layer {layer.index} ({type(layer.module).__name__}) is frozen and its forward "
            f"{wrong}, so outputs from there on differ each "
            "time and cannot be cached; use dynamism.freezing.cache_bytes = 0 with this model"
        )
    return outputs
