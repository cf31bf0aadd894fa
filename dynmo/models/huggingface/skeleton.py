"""Copies of a transformers model in which modules stand for others.

A copy runs the model's own forward: its masks, rotary positions, scales and caps. Its blocks and
the modules that belong to other layers are replaced.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn

from dynmo.kernels.torch_private import unset_fake_temporarily

_T = TypeVar("_T")

_FIRST = "first_parameter"


class Unowned(Generic[_T]):
    """Something that a module uses, but does not own. It is not moved, saved or compared."""

    def __init__(self, value: _T) -> None:
        self.value = value


class Substitute(nn.Module):
    """Stands for a module. Its attributes are those of the module, which it does not own."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._original = Unowned(module)

    @property
    def original(self) -> nn.Module:
        return self._original.value

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_original" not in self.__dict__:
                raise
            return getattr(self.original, name)


class Borrowed(Substitute):
    """Lends a module without weights to several layers."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.original(*args, **kwargs)


class PassedOver(Substitute):
    """Returns its first argument: the module's result is not needed."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args else next(iter(kwargs.values()))


class StandIn(Substitute):
    """Returns zeros of the shapes that the module, which is on the meta device, would return.

    Args:
        traced: Whether what is made of the zeros requires a gradient.
    """

    def __init__(self, module: nn.Module, traced: bool = False) -> None:
        super().__init__(module)
        self._shapes, self._traced = dict[str, Any](), traced

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = (args, kwargs)
        real = (x.device for x in tensors_of(given) if not x.is_meta)
        device = next(real, torch.device("cpu"))
        key = repr(mapped(given, lambda x: (x.shape, x.dtype)))
        if key not in self._shapes:
            # The module has no fake tensors in a run of shapes only.
            with torch.no_grad(), unset_fake_temporarily():
                args, kwargs = mapped(given, on_meta)
                self._shapes[key] = self.original(*args, **kwargs)
        return mapped(self._shapes[key], lambda x: self._zeros(x, device))

    def cast(self, type_of: Callable[[str, Tensor], torch.dtype]) -> None:
        """Gives the module's parameters other types, in a copy.

        Args:
            type_of: Takes the name of a parameter and the parameter.
        """
        with unset_fake_temporarily():
            twin = copy.deepcopy(self.original)
            for name, parameter in twin.named_parameters():
                parameter.data = parameter.data.to(type_of(name, parameter))
        self._original.value, self._shapes = twin, {}

    def _zeros(self, like: Tensor, device: torch.device) -> Tensor:
        zeros = torch.zeros(like.shape, dtype=like.dtype, device=device)
        # Code may change its inputs in place, which a leaf does not allow.
        traced = self._traced and like.is_floating_point()
        return zeros.requires_grad_().clone() if traced else zeros


def on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def mapped(value: _T, change: Callable[[Tensor], Any]) -> _T:
    """Applies `change` to each tensor in nested tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return cast(_T, type(value)(*(mapped(x, change) for x in cast("tuple[Any, ...]", value))))
    if isinstance(value, tuple | list):
        each = [mapped(x, change) for x in cast("list[Any]", value)]
        return cast(_T, each if isinstance(value, list) else tuple(each))
    if isinstance(value, dict):
        return cast(_T, {k: mapped(x, change) for k, x in cast("dict[Any, Any]", value).items()})
    return value


def tensors_of(value: object) -> Iterator[Tensor]:
    """Yields the tensors in nested tuples, lists and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in cast("Mapping[Any, object]", value).values():
            yield from tensors_of(each)
    elif isinstance(value, tuple | list):
        for each in cast("list[object]", value):
            yield from tensors_of(each)


def shallow_copy(module: nn.Module) -> nn.Module:
    """Returns a copy that has the same children, and may get others."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    twin._parameters = dict(module._parameters)
    twin._buffers = dict(module._buffers)
    return twin


def without_memory(module: nn.Module) -> nn.Module:
    """Returns a copy of a module on the CPU whose tensors are one zero each, repeated."""
    twin = copy.deepcopy(module)
    for part in twin.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = nn.Parameter(_repeated(parameter), False)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = _repeated(buffer)
    return twin


def _repeated(like: Tensor) -> Tensor:
    return torch.zeros((), dtype=like.dtype).expand(like.shape)


def overlaid(module: nn.Module, parts: nn.Module) -> nn.Module:
    """Returns a copy of a module with those parts that another one has under the same names."""
    twin = shallow_copy(module)
    for name, child in parts.named_children():
        is_holder = type(child) is nn.Module
        twin._modules[name] = overlaid(module.get_submodule(name), child) if is_holder else child
    return twin


def units_of(model: nn.Module, blocks: str) -> Iterator[str]:
    """Yields the paths of the modules around the list of blocks, each as large as possible.

    A list of modules has no forward, so each of its modules counts.
    """
    for spine in spine_of(blocks):
        for name, child in model.get_submodule(spine).named_children():
            where = f"{spine}.{name}".lstrip(".")
            if f"{blocks}.".startswith(f"{where}."):
                continue
            yield from (
                (f"{where}.{key}" for key, _ in child.named_children())
                if is_list(child)
                else (where,)
            )


def spine_of(blocks: str) -> list[str]:
    """Returns the paths of the modules that hold the list of blocks, the model first."""
    parts = blocks.split(".")
    return [".".join(parts[:depth]) for depth in range(len(parts))]


def is_list(module: nn.Module) -> bool:
    """Whether a module only holds others."""
    return isinstance(module, nn.ModuleList | nn.ModuleDict)


def skeleton(
    model: nn.Module,
    blocks: str,
    unit: Callable[[str, nn.Module], nn.Module | None],
    block: Callable[[int, nn.Module], nn.Module],
) -> nn.Module:
    """Returns a copy of a model with other modules.

    Args:
        blocks: Path of the list of blocks.
        unit: Takes the path of a module around the blocks, and the module. Returns what stands
            for it.
        block: Takes the index of a block, and the block. Returns what stands for it.
    """
    head, _, rest = blocks.partition(".")
    whole = _copied("", model, head, rest, unit, block)
    for path in spine_of(blocks):
        # A model takes its dtype and its device from its first parameter.
        whole.get_submodule(path)._parameters[_FIRST] = nn.Parameter(torch.empty(0), False)
    return whole


def set_first_parameter(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Gives a module that holds the blocks in a skeleton a device and a type."""
    first = module._parameters[_FIRST]
    assert first is not None
    if (first.device, first.dtype) != (device, dtype):
        empty = torch.empty(0, dtype=dtype, device=device)
        module._parameters[_FIRST] = nn.Parameter(empty, False)


def _copied(
    path: str,
    module: nn.Module,
    head: str,
    rest: str,
    unit: Callable[[str, nn.Module], nn.Module | None],
    block: Callable[[int, nn.Module], nn.Module],
) -> nn.Module:
    twin = shallow_copy(module)
    for name, child in module.named_children():
        where = f"{path}.{name}".lstrip(".")
        if name != head and is_list(child):
            twin._modules[name] = listed = shallow_copy(child)
            for key, each in child.named_children():
                listed._modules[key] = unit(f"{where}.{key}", each)
        elif name != head:
            twin._modules[name] = unit(where, child)
        elif rest:
            following, _, later = rest.partition(".")
            twin._modules[name] = _copied(where, child, following, later, unit, block)
        else:
            listed = shallow_copy(child)
            for index, (key, each) in enumerate(child.named_children()):
                listed._modules[key] = block(index, each)
            twin._modules[name] = listed
    return twin
