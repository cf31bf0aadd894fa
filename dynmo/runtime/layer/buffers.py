"""Copies of the buffers that forwards write to, and of the generators that they draw from.

A forward can run again from them. Buffers are copied and compared by value. A tensor's `_version`
is not enough: torch's batch norm does not raise it, nor do writes through `.data` or numpy. Buffers
that give the form of packed weights are left out. Forwards only read them, and they are
large.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dynmo.kernels.packed_weight import gives_form
from dynmo.models.extra_state import extra_state_of, set_extra_state

# Integers of an element's size, in bytes. A complex number of 16 bytes is two of 8.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}

# Elements that are added at once. It limits the memory.
_PART = 1 << 20


# Prefixes of what `Beside.state` returns.
_GENERATOR, _LOSS, _EXTRA = "generator ", "loss ", "extra "


class BufferKey(NamedTuple):
    """Identifies a buffer: place of its owner among the modules, and its name there.

    The generators have the place behind all modules.
    """

    owner: int
    name: str


Copies = Mapping[BufferKey, Tensor | None]
"""Values of buffers at some time. None for a buffer that did not exist then."""


class BufferSet:
    """The buffers of some modules, as long as these keep their submodules.

    Args:
        generators: Generators of their own, by name. Their states count as buffers.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        generators: Mapping[str, torch.Generator] | None = None,
    ) -> None:
        self.generators = dict(generators or {})
        named = [pair for module in modules for pair in module.named_modules()]
        self._owners, self._prefixes = [part for _, part in named], [prefix for prefix, _ in named]

    def __iter__(self) -> Iterator[tuple[BufferKey, Tensor]]:
        for place, owner in enumerate(self._owners):
            for name, buffer in owner._buffers.items():
                if buffer is not None and not gives_form(owner, name):
                    yield BufferKey(place, name), buffer
        for name, generator in self.generators.items():
            yield BufferKey(len(self._owners), name), generator.get_state()

    def _get(self, key: BufferKey) -> Tensor | None:
        if key.owner == len(self._owners):
            return self.generators[key.name].get_state()
        return self._owners[key.owner]._buffers.get(key.name)

    def _set(self, key: BufferKey, value: Tensor | None) -> None:
        if key.owner < len(self._owners):
            self._owners[key.owner]._buffers[key.name] = value
        elif value is not None:
            self.generators[key.name].set_state(value)

    def copies(self, persistent: bool = False) -> Copies:
        return {
            key: b.detach().clone() for key, b in self if not persistent or self._is_persistent(key)
        }

    def _is_persistent(self, key: BufferKey) -> bool:
        return (
            key.owner == len(self._owners)
            or key.name not in self._owners[key.owner]._non_persistent_buffers_set
        )

    def written(self, before: Copies, waits: bool = True) -> Copies:
        """Returns the earlier values (`copies`) of the buffers that have other values now.

        If it does not wait for a device, buffers there count as written.
        """
        return {
            key: before.get(key)
            for key, now in self._pairs(before)
            if not (waits or now is None or now.is_cpu) or not has_same_bits(before.get(key), now)
        }

    def _pairs(self, before: Copies) -> Iterable[tuple[BufferKey, Tensor | None]]:
        """Returns the buffers that exist, and None for those that existed before only."""
        return (dict.fromkeys(before) | dict(self)).items()

    def persistent(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the buffers of the model's state with their names, in the module's order."""
        return ((self.name_of(key), b) for key, b in self if self._is_persistent(key))

    def first_of(self, keys: Iterable[BufferKey], persistent: bool) -> str | None:
        """Returns the name of the first of these buffers that is in the model's state, or not."""
        names = (self.name_of(x) for x in sorted(keys) if self._is_persistent(x) == persistent)
        return next(names, None)

    def name_of(self, key: BufferKey) -> str:
        if key.owner == len(self._owners):
            return key.name
        return f"{self._prefixes[key.owner]}.{key.name}".lstrip(".")

    def restore(self, copies: Copies) -> None:
        """Gives every buffer its value in `copies`, and removes newer buffers."""
        with torch.no_grad():
            for key, buffer in self._pairs(copies):
                copy = copies.get(key)
                if (
                    key.owner < len(self._owners)
                    and copy is not None
                    and buffer is not None
                    and copy.shape == buffer.shape
                    and copy.dtype == buffer.dtype
                ):
                    buffer.copy_(copy)
                else:
                    self._set(key, copy)

    def renew(self, keys: Iterable[BufferKey]) -> None:
        """Puts equal tensors in the buffers' places. Graphs keep the old ones as they are."""
        for key in keys:
            buffer = self._get(key)
            if buffer is not None:
                self._set(key, buffer.detach().clone())

    @contextmanager
    def replaced(self, copies: Copies) -> Generator[None]:
        """Replaces the buffers by copies within the context, where writes are lost."""
        now = {key: self._get(key) for key in copies}
        try:
            for key, copy in copies.items():
                self._set(key, None if copy is None else copy.clone())
            yield
        finally:
            for key, buffer in now.items():
                self._set(key, buffer)


class Beside:
    """State that is no buffer of a layer: of its generators, the loss, and extra state."""

    def __init__(
        self, module: nn.Module, losses: Iterable[nn.Module], generators: dict[str, torch.Generator]
    ) -> None:
        self._module, self._losses, self._generators = module, list(losses), generators
        self._before = {name: b.clone() for name, b in self._buffers.items()}

    @property
    def _buffers(self) -> dict[str, Tensor]:
        return dict(pair for part in self._losses for pair in part.named_buffers())

    def state(self) -> dict[str, Tensor]:
        """Returns the state by name. A buffer of the loss counts if a forward has written to it."""
        states = {f"{_GENERATOR}{name}": own.get_state() for name, own in self._generators.items()}
        states |= {f"{_EXTRA}{name}": t for name, t in extra_state_of(self._module).items()}
        return states | {
            f"{_LOSS}{name}": buffer
            for name, buffer in self._buffers.items()
            if not has_same_bits(buffer, self._before[name])
        }

    def put(self, state: Mapping[str, Tensor]) -> None:
        """Takes what `state` returned."""
        extra = {key.removeprefix(_EXTRA): t for key, t in state.items() if key.startswith(_EXTRA)}
        set_extra_state(self._module, extra)
        for key, value in state.items():
            if (name := key.removeprefix(_GENERATOR)) in self._generators:
                self._generators[name].set_state(value.cpu())
            elif (name := key.removeprefix(_LOSS)) in self._buffers:
                self._buffers[name].copy_(value)


def has_same_bits(a: object, b: object) -> bool:
    """Returns whether two tensors are equal bit for bit, so that NaN equals NaN.

    Waits for a CUDA device. Tensors of subclasses (fake tensors, say) and sparse tensors cannot be
    compared and count as different, like all other objects.
    """
    return (
        type(a) is Tensor
        and type(b) is Tensor
        and a.layout == b.layout == torch.strided
        and a.shape == b.shape
        and a.dtype == b.dtype
        and torch.equal(_bits(a), _bits(b))
    )


def sum_of_bits(tensor: Tensor) -> int:
    """Returns a number that a write to the tensor nearly always changes. Waits for its device."""
    if tensor.is_meta or tensor.layout != torch.strided:
        return 0
    return sum(int(part.sum(dtype=torch.int64)) for part in _bits(tensor).split(_PART))


def _bits(tensor: Tensor) -> Tensor:
    return (
        tensor.detach()
        .resolve_conj()
        .resolve_neg()
        .reshape(-1)
        .view(_INTEGERS[tensor.element_size()])
    )
