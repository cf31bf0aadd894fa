"""Buffers that a forward writes to (running statistics, say): a forward that is run again must find them as it did at first.

Most buffers are never written to, and some are large (the indices of sparse weights). So which ones are is learnt as steps run, and only
those are copied: before a step that may have to begin again (`WrittenBuffers`), before the F of a layer that computes again in B
(`FoundBuffers`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dynmo.errors import RunError


class WrittenBuffers:
    """The buffers of some modules, for as long as these keep their submodules."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        parts = [part for module in modules for part in module.modules() if part._buffers]
        self._owners = [part._buffers for part in parts]
        self._remade = [part._non_persistent_buffers_set for part in parts]
        self._seen: dict[tuple[int, str], tuple[Tensor, int]] = {}
        self._written: set[tuple[int, str]] = set()
        self._copies: dict[tuple[int, str], Tensor] = {}

    def _each(self) -> Iterable[tuple[tuple[int, str], Tensor]]:
        for place, owner in enumerate(self._owners):
            for name, buffer in owner.items():
                if buffer is not None:
                    yield (place, name), buffer

    def note(self, keep: bool) -> None:
        """Before a step. keep: it may have to begin again."""
        self._seen = {key: (buffer, buffer._version) for key, buffer in self._each()}
        self._copies = {key: self._seen[key][0].clone() for key in self._written} if keep else {}

    def learn(self) -> None:
        """After a step: which of them it wrote to."""
        self._written.update(self._changed())
        self._copies.clear()

    @property
    def written(self) -> tuple[str, ...]:
        """By name, of those that are part of the model's state (persistent)."""
        return tuple(name for place, name in sorted(self._written) if name not in self._remade[place])

    def _changed(self) -> list[tuple[int, str]]:
        """In place, or by putting another tensor there."""
        return [
            key
            for key, buffer in self._each()
            if (known := self._seen.get(key)) is None or known[0] is not buffer or known[1] != buffer._version
        ]

    def put_back(self) -> None:
        """The step begins again. Raises RunError if a buffer was written to that no step before has written to."""
        for key in self._changed():
            if key not in self._copies:
                raise RunError(
                    f"a forward has written to the buffer {key[1]!r}, which it did not in earlier steps, and it must run again; "
                    "use pipeline.post_validation = false with this model"
                )
        with torch.no_grad():
            for (place, name), copy in self._copies.items():
                buffer = self._owners[place][name]
                if buffer is not None and buffer.shape == copy.shape:
                    buffer.copy_(copy)
                else:
                    self._owners[place][name] = copy


Found = Mapping[tuple[int, str], Tensor | None]
"""What a forward found in the buffers that it writes to; None where it has made one."""


class FoundBuffers:
    """Of one layer: what an F found, so that it can be run again on that, and leaves the buffers as they are by then."""

    def __init__(self, module: nn.Module, index: int) -> None:
        self._index = index
        self._owners = [part._buffers for part in module.modules() if part._buffers]
        self._written: set[tuple[int, str]] | None = None  # not known before the first F

    def _each(self) -> dict[tuple[int, str], Tensor]:
        return {(place, name): b for place, owner in enumerate(self._owners) for name, b in owner.items() if b is not None}

    def watch(self) -> Callable[[], Found]:
        """Before F; what it returns is called behind it. That raises RunError if F wrote to a buffer that it did not write to at first."""
        before = {key: (b, b._version) for key, b in self._each().items()}
        copies = {key: b.clone() for key, (b, _) in before.items() if self._written is None or key in self._written}

        def found() -> Found:
            changed = {
                key for key, b in self._each().items() if key not in before or before[key][0] is not b or before[key][1] != b._version
            }
            if self._written is None:
                self._written = changed
            unknown = next(iter(sorted(changed - self._written)), None)
            if unknown is not None:
                raise RunError(
                    f"layer {self._index} has written to the buffer {unknown[1]!r}, which it did not in its first microbatch, and it must "
                    "run again; leave it out of train.recompute"
                )
            return {key: copies.get(key) for key in self._written}

        return found

    @contextmanager
    def put_back(self, found: Found) -> Generator[None]:
        """Within, the buffers are what F found. Other tensors take the places of those that are there: these may be in use."""
        now = {(place, name): self._owners[place][name] for place, name in found}
        try:
            for (place, name), buffer in found.items():
                self._owners[place][name] = buffer
            yield
        finally:
            for (place, name), buffer in now.items():
                self._owners[place][name] = buffer
