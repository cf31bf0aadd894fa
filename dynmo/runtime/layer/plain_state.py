"""Plain attributes of modules, such as a counter: neither parameters nor buffers.

Only numbers and strings move with a layer. No checkpoint has them, and a forward that runs again
finds them changed. Many are harmless: a cached mask, or the last attention map. `Layer.forward`
refuses those that change the layer's output.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from dynmo.runtime.layer.buffers import has_same_bits

_OF_TORCH = frozenset(vars(nn.Module()))
_CONTAINERS = (list, dict, set)

Scalar = bool | int | float | str | None
Scalars = dict[str, dict[str, Scalar]]
"""Numbers and strings that the modules of a layer have as attributes, by module and name."""


def scalars_of(module: nn.Module) -> Scalars:
    """Returns those of a user's modules, such as `p` of a dropout, which a loop may change."""
    return {
        prefix: {
            name: value
            for name, value in vars(part).items()
            if name not in _OF_TORCH and type(value) in (bool, int, float, str, type(None))
        }
        for prefix, part in module.named_modules()
        if not type(part).__module__.startswith("dynmo.")
    }


def set_scalars(module: nn.Module, scalars: Scalars) -> None:
    for prefix, part in module.named_modules():
        vars(part).update(scalars.get(prefix, {}))


class PlainState:
    """The attributes of a module and its submodules now, except for dynmo's own."""

    def __init__(self, module: nn.Module) -> None:
        self._parts = [
            (name, part)
            for name, part in module.named_modules()
            if not type(part).__module__.startswith("dynmo.")
        ]
        self._before = {key: (value, _contents(value)) for key, value in self._attributes()}

    def _attributes(self) -> Iterator[tuple[tuple[int, str], object]]:
        for place, (_, part) in enumerate(self._parts):
            for name, value in vars(part).items():
                if name not in _OF_TORCH:
                    yield (place, name), value

    def written(self) -> str | None:
        """Returns the name of the first attribute that has another value now, or None."""
        for (place, name), value in self._attributes():
            before = self._before.get((place, name))
            if before is None or not _is_same(*before, value):
                return f"{self._parts[place][0]}.{name}".lstrip(".")
        return None

    def restore(self) -> None:
        """Binds every attribute to the object that it was bound to."""
        for (place, name), (value, _) in self._before.items():
            vars(self._parts[place][1])[name] = value


def _contents(value: Any) -> object:
    """Returns a copy of a value that may change in place."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return tuple(value) if isinstance(value, _CONTAINERS) else value


def _is_same(before: object, contents: Any, now: Any) -> bool:
    if isinstance(now, Tensor):
        return has_same_bits(contents, now)
    if isinstance(now, _CONTAINERS):
        return before is now and [*map(id, contents)] == [*map(id, now)]
    return before is now or (isinstance(now, int | float | str | bytes) and before == now)
