"""A frozen prefix's outputs, kept for when the same microbatch comes again (Egeria, Wang et al.
2022).

A rank keeps what the last of its frozen leading layers made of a microbatch, under that layer's
index and the microbatch's key. Where it comes again, they do not run. Nothing of this crosses
ranks: messages are what they were.

    rank 0 | layers 0 1 2 | 3 4 5    frozen: 0 to 4        rank 0 keeps the outputs of 2, rank 1 those of 4, and its F is 5's alone
                   kept ^     ^

An output is a function of the key and of the weights up to its layer: it stays right wherever the
layers in front move, and when more layers freeze behind it; then F goes on from there. It is wrong
once a layer up to it thaws or changes (`forget`), and of no use once its layer is elsewhere
(`hold`).

Equal bits: only copies are kept, and only copies handed out, so that nobody can write to what is
kept. A layer that draws random numbers, or that writes to a buffer, does something else each time,
which no other rank can know: such a run fails.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence

import torch

from dynmo.errors import RunError
from dynmo.runtime.comm.clock import Clock
from dynmo.runtime.layer.split_backward import Layer, Tensors

Keys = Sequence[Hashable]
"""Of each microbatch of a run: equal only where the inputs of the first stage are."""


class OutputCache:
    """limit: bytes of host memory; 0: nothing is kept. `bytes` is what is in use, `spared` how many
    layers' F were."""

    # Full, it keeps what it has: epochs go round, so whatever would be evicted is needed again
    # sooner than what came last.

    def __init__(self, limit: int, clock: Clock) -> None:
        self.limit, self._clock = limit, clock
        self.bytes = self.spared = 0
        self._entries: dict[tuple[int, Hashable], _Kept] = {}
        self._keys: Keys | None = None

    def begin(self, keys: Keys | None, training: bool) -> None:
        """Before a run. keys: None where its microbatches do not come again."""
        self._keys = None if keys is None else [(training, key) for key in keys]

    def forward(
        self, layers: Sequence[Layer], microbatch: int, inputs: Tensors, step: int
    ) -> Tensors:
        """F of frozen leading layers, as far as it must run. Raises RunError where a layer does not
        do the same each time."""
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
        """How many of the layers need not run, and the output of the last of these. A layer whose
        sizes are not known yet, as it has just come, runs."""
        known = next((i for i, layer in enumerate(layers) if not layer.output_bytes), len(layers))
        for count in range(known, 0, -1):
            entry = self._entries.get((layers[count - 1].index, key))
            if entry is not None:
                return count, entry
        return 0, None

    def _mark(self, spared: Sequence[Layer], start: object) -> None:
        """For the profiler: the last one's F is the copy, the others' is nothing."""
        end = self._clock.mark()
        for layer in spared[:-1]:
            layer.spare(start, start)
        spared[-1].spare(start, end)

    def _keep(self, layers: Sequence[Layer], key: Hashable, outputs: Tensors) -> None:
        """In place of what is kept of the layers in front, if it fits."""
        before = [at for layer in layers if (at := (layer.index, key)) in self._entries]
        freed = sum(self._entries[at].bytes for at in before)
        if self.bytes - freed + _size(outputs) > self.limit:
            return
        self._drop(before)
        kept = self._entries[layers[-1].index, key] = _Kept(outputs)
        self.bytes += kept.bytes

    # -- what holds no longer ----------------------------------------------------------------------

    def forget(self, layers: Iterable[int]) -> None:
        """These layers have changed, on whatever rank: what was made of them or behind them is
        wrong now."""
        first = min(layers, default=None)
        if first is not None:
            self._drop([at for at in self._entries if at[0] >= first])

    def hold(self, layers: Collection[int]) -> None:
        """The frozen leading layers here are these: of others, outputs are of no use."""
        self._drop([at for at in self._entries if at[0] not in layers])

    def _drop(self, gone: Iterable[tuple[int, Hashable]]) -> None:
        for at in gone:
            self.bytes -= self._entries.pop(at).bytes


class _Kept:
    """Copies in host memory. From a CUDA device and to it only the stream waits for them, which
    needs memory that is pinned."""

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
    """Bytes of host memory: torch takes pinned memory in powers of two."""
    return sum(
        1 << (y.nbytes - 1).bit_length() if y.is_cuda and y.nbytes else y.nbytes for y in tensors
    )


def _forward(layer: Layer, microbatch: int, inputs: Tensors, step: int, drawing: bool) -> Tensors:
    """drawing: it may draw random numbers, for its output is not kept. Buffers it may never write
    to: outputs that are kept of evaluations, here or on ranks behind, know the ones before."""
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
            f"layer {layer.index} ({type(layer.module).__name__}) is frozen and its forward {wrong}, so outputs from there on differ each "
            "time and cannot be cached; use dynamism.freezing.cache_bytes = 0 with this model"
        )
    return outputs
