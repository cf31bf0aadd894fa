"""What a layer or a loss can reach beside its own modules.

It follows attributes, containers, closures and the globals that functions name. It may find more
than is used.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor, nn

_OF_TORCH = frozenset(vars(nn.Module())) - {
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
}
# torch keeps the parameters of an RNN here, and follows their change.
_OF_TORCH |= {"_flat_weights"}
# Their code keeps nothing of a user's model.
_LIBRARIES = frozenset({"torch", "transformers", "peft", "dynmo", "numpy", "builtins", "functools"})
# Limits of the search: depth, objects, and elements of a container.
_DEEPEST, _MOST, _LONGEST = 8, 20_000, 1000


def reachable(root: object, own: bool = False) -> Iterator[tuple[str, object]]:
    """Yields the tensors, modules and generators that a layer or a loss can reach, with paths.

    The root's own submodules are not among them. Its own parameters and buffers are if `own`, and
    if it also has them beside its modules.
    """
    seen, held = set[int](), list[object]()

    def reached(path: str, value: Any, depth: int = 0) -> Iterator[tuple[str, object]]:
        if isinstance(value, _LEAVES) or id(value) in seen or depth > _DEEPEST:
            return
        if len(held) >= _MOST:
            return
        seen.add(id(value))
        held.append(value)  # so that no id comes twice
        if isinstance(value, Tensor | torch.Generator | nn.Module):
            yield path, value
            return
        for name, each in _inside(value):
            yield from reached(f"{path}{name}", each, depth + 1)

    if not isinstance(root, nn.Module):
        yield from reached(getattr(root, "__name__", "loss"), root)
        return
    parts = list(root.named_modules())
    for _, part in parts:
        seen.add(id(part))
        if not own:
            seen.update(map(id, (*part._parameters.values(), *part._buffers.values())))
    for prefix, part in parts:
        # A module of dynmo follows a change of its parameters. torch's hooks compute `x` from
        # `x_orig` before each forward.
        follows = own and any(each.__module__.startswith("dynmo.") for each in type(part).__mro__)
        attributes = [
            (name, value)
            for name, value in vars(part).items()
            if name not in _OF_TORCH
            and not (follows and name.startswith("_"))
            and f"{name}_orig" not in part._parameters
        ]
        for name, value in (*attributes, *_methods(type(part))):
            yield from reached(f"{prefix}.{name}".lstrip("."), value)


def modules_of(root: object) -> list[tuple[str, nn.Module]]:
    """Returns the modules of a layer, or of a loss that is one or a method of one."""
    while isinstance(root, partial):
        root = cast(object, root.func)
    if isinstance(root, types.MethodType):
        root = root.__self__
    return list(root.named_modules()) if isinstance(root, nn.Module) else []


def generators_of(*roots: object) -> dict[str, torch.Generator]:
    """Returns the generators that layers or losses can reach, by path, each once.

    Those of torch itself are left out: each layer and microbatch has seeds of its own for them.
    """
    found = dict[str, torch.Generator]()
    for root in roots:
        for path, value in reachable(root):
            if (
                isinstance(value, torch.Generator)
                and value is not torch.default_generator
                and value not in getattr(torch.cuda, "default_generators", ())
                and value not in found.values()
            ):
                found[path] = value
    return found


_LEAVES = (str, bytes, int, float, complex, type, types.ModuleType, type(None), torch.dtype)


def _inside(value: Any) -> Iterable[tuple[str, object]]:
    if isinstance(value, types.FunctionType):
        return _of_function(value)
    if isinstance(value, types.MethodType):
        return [("", value.__func__), ("", value.__self__)]
    if isinstance(value, partial):
        return [("", value.func), ("", value.args), ("", value.keywords)]
    if isinstance(value, dict):
        given = cast("dict[object, object]", value)
        return [(f"[{key!r}]", each) for key, each in islice(given.items(), _LONGEST)]
    if isinstance(value, list | tuple | set | frozenset | deque):
        several = cast("Iterable[object]", value)
        return [(f"[{at}]", each) for at, each in enumerate(islice(several, _LONGEST))]
    if type(value).__module__.partition(".")[0] in _LIBRARIES:
        return []
    own = [(f".{name}", each) for name, each in getattr(value, "__dict__", {}).items()]
    return [*own, *((f".{name}", each) for name, each in _methods(type(value)))]


def _of_function(value: types.FunctionType) -> Iterator[tuple[str, object]]:
    if value.__module__ and value.__module__.partition(".")[0] in _LIBRARIES:
        return
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
        try:
            yield f" ({name})", cell.cell_contents
        except ValueError:  # it is not filled yet
            continue
    for each in (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()):
        yield " (default)", each
    for name in _names(value.__code__):
        if name in value.__globals__:
            yield f" ({name})", value.__globals__[name]


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _names(each)


def _methods(kind: type) -> Iterator[tuple[str, object]]:
    for each in kind.__mro__:
        if each.__module__.partition(".")[0] not in _LIBRARIES:
            for name, value in vars(each).items():
                if isinstance(value, types.FunctionType):
                    yield name, value
