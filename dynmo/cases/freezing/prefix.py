"""A frozen prefix of the model: its units, its end, how it grows, and what it keeps."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from itertools import groupby

from torch import Tensor, nn

from dynmo import Change, Dynamism, Layers
from dynmo.cases.freezing.cache import OutputCache
from dynmo.extend import FrozenPrefix


def units(names: Sequence[str], unit: str) -> tuple[range, ...]:
    """Groups the layers that freeze at once.

    embedding | blocks.0.attention  blocks.0.feed_forward | blocks.1.attention  ... | head
    """

    def module(layer: int) -> str:
        match = re.fullmatch(r"(.+\.\d+)\.[^.]+", names[layer])
        return str(layer) if unit == "half" or match is None else match[1]

    groups = [tuple(group) for _, group in groupby(range(len(names)), module)]
    return tuple(range(group[0], group[-1] + 1) for group in groups)


def learns(modules: Sequence[nn.Module], layers: Iterable[int]) -> bool:
    """True if any of these layers has something to train."""
    return any(
        parameter.requires_grad for layer in layers for parameter in modules[layer].parameters()
    )


def last_to_learn(modules: Sequence[nn.Module]) -> int:
    """Returns the last layer with something to train. It must not freeze."""
    return max((layer for layer in range(len(modules)) if learns(modules, (layer,))), default=0)


def front(layers: Layers) -> int:
    return next(i for i in range(layers.count) if i not in layers.frozen)


def freeze_prefix(layers: Layers, count: int, why: str) -> Change | None:
    """Freezes the leading layers. Never thaws."""
    new = tuple(i for i in range(count) if i not in layers.frozen)
    if not new:
        return None
    layers.freeze(new)
    return Change(
        new, f"froze layers {new[0]} to {new[-1]} ({why}); {count} of {layers.count} are frozen"
    )


class PrefixCase(Dynamism):
    """Freezes leading layers, and may keep their outputs."""

    name = "freezing"
    announces = True
    cache: OutputCache | None = None

    def frozen_prefix(
        self, layers: Sequence[int]
    ) -> Callable[[FrozenPrefix, Hashable | None], tuple[Tensor, ...]] | None:
        if self.cache is None:
            return None
        self.cache.hold(layers)
        return self.cache.run

    def changed(self, layers: Collection[int]) -> None:
        if self.cache is not None:
            self.cache.forget(layers)
