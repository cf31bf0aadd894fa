"""What a layer or the loss shares with other layers, which may be on other ranks, or older there.

A parameter that autograd follows is a leaf of the layer's graph (`check_leaves`). Other reads are
seen by `Reads`, which watches only what can reach a tensor of another layer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn

from dynmo.errors import ConfigError
from dynmo.kernels.grouped_linear import gradient_parameters
from dynmo.kernels.torch_private import TorchDispatchMode, tree_leaves
from dynmo.models.model import named_tensors
from dynmo.models.reach import modules_of, reachable
from dynmo.runtime.comm.headers import mark_alias

Others = Callable[[], Mapping[int, str]]
"""Returns the tensors of other layers: storage -> name."""

_ADVICE = (
    "which may be on another rank; let the layer hand on what is read with its output, or tie the "
    "two weights (tied=)"
)


def storage_of(tensor: Tensor) -> int | None:
    """Identifies a memory block, also on the meta device, where every address is 0."""
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else None


def others_of(layers: Iterable[tuple[int, object]], module: nn.Module) -> dict[int, str]:
    """Returns the tensors of layers, if they are modules, that are not those of `module`."""
    found = dict[int, str]()
    for index, layer in layers:
        for what, name, tensor in named_tensors(layer) if isinstance(layer, nn.Module) else ():
            if (storage := storage_of(tensor)) is not None:
                found[storage] = f"the {what} {name} of layer {index}"
    for _, _, tensor in named_tensors(module):
        found.pop(storage_of(tensor) or 0, None)
    return found


def check_leaves(who: str, leaves: Iterable[Tensor], module: nn.Module, others: Others) -> None:
    """Raises ConfigError if a graph trains a parameter that is not the layer's own."""
    foreign = {x for x in leaves if isinstance(x, nn.Parameter)} - {*gradient_parameters(module)}
    for parameter in foreign:
        name = others().get(storage_of(parameter) or 0)
        problem = f"reads {name}, {_ADVICE}"
        if name is None:
            problem = (
                f"trains a parameter of shape {list(parameter.shape)} that is in no layer, so no "
                "optimizer has it; register it in the layer, or in the last layer for the loss"
            )
        raise ConfigError(f"{who} {problem}")


def mark_aliases(outputs: Sequence[Tensor], marked: Sequence[Tensor], living: list[Tensor]) -> None:
    """Marks the outputs that share memory with one another, or with a tensor that lives on."""
    for at, y in enumerate(outputs):
        others = [*outputs[:at], *outputs[at + 1 :], *living]
        if any(_overlap(y, other) for other in others):
            mark_alias(marked[at])


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Returns whether a write to one tensor may change the other."""
    if storage_of(a) is None or storage_of(a) != storage_of(b) or not a.numel() or not b.numel():
        return False
    if a.dtype != b.dtype or a.is_meta or type(a) is not type(b):
        return True
    # Parts such as columns may lie between one another.
    size = a.untyped_storage().nbytes() // a.element_size()
    taken = torch.zeros(size, dtype=torch.bool, device=a.device)
    offsets = [cast(int, x.storage_offset()) for x in (a, b)]
    taken.as_strided(a.shape, a.stride(), offsets[0]).fill_(True)
    return bool(taken.as_strided(b.shape, b.stride(), offsets[1]).any())


def second_place_of(
    layer: nn.Module, changing: Collection[str], tied: Collection[str] = (), same: bool = True
) -> str | None:
    """Says that a layer keeps one of its tensors in a second place, and what to do.

    The place is beside its modules, or in the memory of another of its tensors.

    Args:
        changing: Names of the tensors that others are to replace.
        tied: Parameters that follow another one by themselves.
        same: Whether the same tensor beside the modules counts, and not only another over its
            memory.
    """
    named = [each for each in named_tensors(layer) if each[1] not in tied]
    places = sorted((_Place.of(tensor), name, what) for what, name, tensor in named)
    for path, value in reachable(layer, same):
        reached = _Place.of(value) if isinstance(value, Tensor) else None
        for place, name, what in places:
            if name in changing and reached is not None and place.meets(reached):
                return (
                    f"keeps its {what} {name} in {path}, too, which would keep old values; read "
                    f"self.{name} instead"
                )
    for (place, name, what), (other, second, kind) in pairwise(places):
        if name != second and {name, second} & {*changing} and place.meets(other):
            return (
                f"has one memory for its {what} {name} and its {kind} {second}, which would part; "
                "compute one from the other in forward"
            )
    return None


@dataclass(frozen=True, order=True)
class _Place:
    """The memory block of a tensor, and the first and last byte there."""

    storage: int
    start: int
    end: int
    tensor: Tensor = field(compare=False)

    @classmethod
    def of(cls, tensor: Tensor) -> _Place:
        storage, size = storage_of(tensor), tensor.element_size()
        if storage is None or not tensor.numel():
            return cls(0, 0, 0, tensor)
        start = cast(int, tensor.storage_offset()) * size
        reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        return cls(storage, start, start + (reach + 1) * size, tensor.detach())

    def meets(self, other: _Place) -> bool:
        near = max(self.start, other.start) < min(self.end, other.end)
        return self.storage == other.storage and near and _overlap(self.tensor, other.tensor)


class Reads(TorchDispatchMode):
    """Raises ConfigError if a layer or the loss computes with a tensor of another layer."""

    def __init__(self, who: str, root: object, others: Others) -> None:
        super().__init__()
        self._who, self._root, self._find = who, root, others
        # None before the first step.
        self._watches: bool | None = None
        self._others: Mapping[int, str] = {}
        self._given = set[int | None]()

    def begin(self) -> None:
        """Looks where the tensors of other layers are now."""
        if self._watches is None:
            reached = list(_tensors_of(self._root))
            others = self._find() if reached else {}
            self._watches = any(storage_of(tensor) in others for tensor in reached)
        if self._watches:
            self._others = self._find()

    def run(self, call: Callable[..., Any], *inputs: Any) -> Any:
        if not self._watches:
            return call(*inputs)
        # A layer may hand its weight on.
        self._given = {storage_of(x) for x in tree_leaves(inputs) if isinstance(x, Tensor)}
        with self:
            return call(*inputs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in tree_leaves((args, kwargs)):
            storage = storage_of(x) if isinstance(x, Tensor) else None
            if storage is None or storage in self._given or storage not in self._others:
                continue
            # The memory may have become another tensor's.
            name = self._find().get(storage)
            if name is not None:
                raise ConfigError(f"{self._who} reads {name}, {_ADVICE}")
        return func(*args, **(kwargs or {}))


def _tensors_of(root: object) -> Iterator[Tensor]:
    for value in (*(value for _, value in reachable(root)), *(x for _, x in modules_of(root))):
        if isinstance(value, nn.Module):
            yield from (tensor for _, _, tensor in named_tensors(value))
        elif isinstance(value, Tensor):
            yield value
