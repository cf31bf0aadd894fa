"""Modules that stand for others, and copies of a transformers model that have such modules.

A copy runs the model's own forward: its masks, rotary positions, scales and caps. Stubs replace its
blocks and the modules that belong to other layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from dynmo.kernels.torch_private import tree_leaves, tree_map_only, unset_fake_temporarily

_T = TypeVar("_T")
_M = TypeVar("_M", bound=nn.Module)

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


class AddsNothing(Substitute):
    """Returns zeros of the shape of its input.

    Args:
        elements: Length of the tuple that the module returns. None if it returns a tensor.
    """

    def __init__(self, module: nn.Module, elements: int | None) -> None:
        super().__init__(module)
        self._elements = elements

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = args[0] if args else kwargs.get("hidden_states", next(iter(kwargs.values())))
        return _as_tuple(torch.zeros_like(given), self._elements)


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a block after its hidden states: by position, and by name."""


class Recorder(Substitute):
    """Stands for a block. Hands its hidden states on, and keeps its other arguments.

    Args:
        elements: Length of the tuple that the block returns. None if it returns a tensor.
    """

    def __init__(self, block: nn.Module, elements: int | None = None) -> None:
        super().__init__(block)
        self.elements = elements
        # Takes the place of the hidden states, if it is set.
        self.given: Tensor | None = None
        self.forget()

    def forget(self) -> None:
        """Frees the tensors that it keeps."""
        self.taken: Tensor | None = None
        self.arguments: Arguments = ((), {})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = self.note(args, kwargs)
        return _as_tuple(hidden if self.given is None else self.given, self.elements)

    def note(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Keeps the arguments of a block. Returns its hidden states."""
        rest = {name: value for name, value in kwargs.items() if args or name != "hidden_states"}
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        self.taken, self.arguments = hidden, (args[1:], rest)
        return hidden


def _as_tuple(first: Tensor, elements: int | None) -> Any:
    return first if elements is None else (first, *[None] * (elements - 1))


def hidden_of(out: Any) -> Any:
    """Returns the hidden states of what a block returned."""
    return out[0] if isinstance(out, tuple | list) else out


def on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def mapped(value: _T, change: Callable[[Tensor], Any]) -> _T:
    """Applies `change` to each tensor in nested tuples, lists and dictionaries."""
    return tree_map_only(Tensor, change, value)


def tensors_of(value: object) -> list[Tensor]:
    """Returns the tensors in nested tuples, lists and dictionaries."""
    return [each for each in tree_leaves(value) if isinstance(each, Tensor)]


def has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def shallow_copy(module: nn.Module) -> nn.Module:
    """Returns a copy that has the same children, and may get others."""
    twin = copy.copy(module)
    for name in ("_modules", "_parameters", "_buffers"):
        setattr(twin, name, dict(getattr(module, name)))
    return twin


def with_module(module: nn.Module, path: str, other: nn.Module) -> nn.Module:
    """Returns a copy that has another module at a path, and shares all else."""
    twin, (name, _, rest) = shallow_copy(module), path.partition(".")
    twin._modules[name] = with_module(module.get_submodule(name), rest, other) if rest else other
    return twin


def retensored(module: nn.Module, make: Callable[[Tensor], Tensor]) -> None:
    """Gives a module other tensors in place of its parameters and buffers."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = nn.Parameter(make(parameter), parameter.requires_grad)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = make(buffer)


def marked(like: Tensor) -> Tensor:
    """Returns a tensor on the CPU that has no value yet, but a mark."""
    if like.is_floating_point():
        mark = float("nan")
    else:
        mark = False if like.dtype == torch.bool else torch.iinfo(like.dtype).min
    return torch.full(like.shape, mark, dtype=like.dtype, device="cpu")


def has_no_values() -> bool:
    """True while new tensors are fake: they have shapes, but no values."""
    return type(torch.empty(0)) is not Tensor


def without_memory(module: nn.Module) -> nn.Module:
    """Returns a copy of a module on the CPU whose tensors are one zero each, repeated."""
    twin = copy.deepcopy(module)
    retensored(twin, lambda like: torch.zeros((), dtype=like.dtype).expand(like.shape))
    return twin


def overlaid(module: nn.Module, parts: nn.Module) -> nn.Module:
    """Returns a copy of a module with those parts that another one has under the same names."""
    twin = shallow_copy(module)
    for name, child in parts.named_children():
        is_holder = type(child) is nn.Module
        twin._modules[name] = overlaid(module.get_submodule(name), child) if is_holder else child
    return twin


def spine_of(blocks: str) -> list[str]:
    """Returns the paths of the modules that hold the list of blocks, the model first."""
    parts = blocks.split(".")
    return [".".join(parts[:depth]) for depth in range(len(parts))]


def units_of(model: nn.Module, blocks: str) -> Iterator[str]:
    """Yields the paths of the modules around the list of blocks, each as large as possible.

    A list of modules has no forward, so each of its modules counts.
    """
    for spine in spine_of(blocks):
        for name, child in model.get_submodule(spine).named_children():
            where = f"{spine}.{name}".lstrip(".")
            if f"{blocks}.".startswith(f"{where}."):
                continue
            is_list = isinstance(child, nn.ModuleList | nn.ModuleDict)
            yield from (
                (f"{where}.{key}" for key, _ in child.named_children()) if is_list else [where]
            )


def with_stubs(
    model: nn.Module,
    blocks: str,
    unit: Callable[[str, nn.Module], nn.Module],
    block: Callable[[int, nn.Module], _M],
) -> tuple[nn.Module, list[_M]]:
    """Returns a copy of a model with other modules, and what stands for its blocks.

    Args:
        blocks: Path of the list of blocks.
        unit: Takes the path of a module around the blocks, and the module. Returns what stands
            for it.
        block: Takes the index of a block, and the block. Returns what stands for it.
    """
    others = {path: unit(path, model.get_submodule(path)) for path in units_of(model, blocks)}
    listed = dict(model.get_submodule(blocks).named_children())
    made = [block(at, each) for at, each in enumerate(listed.values())]
    others |= {f"{blocks}.{key}": each for key, each in zip(listed, made, strict=True)}
    whole = shallow_copy(model)
    for path, stub in others.items():
        holder, original = whole, model
        *parents, name = path.split(".")
        for parent in parents:
            original = original.get_submodule(parent)
            if holder._modules[parent] is original:
                holder._modules[parent] = shallow_copy(original)
            holder = holder.get_submodule(parent)
        holder._modules[name] = stub
    for path in spine_of(blocks):
        # A model takes its dtype and its device from its first parameter.
        whole.get_submodule(path)._parameters[_FIRST] = nn.Parameter(torch.empty(0), False)
    return whole, made


def set_first_parameter(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Gives a module that holds the blocks in a copy a device and a type."""
    first = module._parameters[_FIRST]
    assert first is not None
    if (first.device, first.dtype) != (device, dtype):
        empty = torch.empty(0, dtype=dtype, device=device)
        module._parameters[_FIRST] = nn.Parameter(empty, False)
