"""Which layers of a transformers model train."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dynmo.errors import ConfigError
from dynmo.models.huggingface.building import Place

Freeze = int | str | range
"""The index of a block, several of them, or the name of a layer."""


def frozen_layers(
    places: Sequence[Place], freeze: Iterable[Freeze], train_last: int | None
) -> frozenset[int]:
    """Returns the indices of the layers that do not train.

    Args:
        places: The layers of the model.
        freeze: Blocks by index, and layers by name, such as "embedding" or "blocks.0.attention".
        train_last: Number of last blocks that train, with the output layer. All else is frozen.

    Raises:
        ConfigError: There is no such block or layer.
    """
    blocks = 1 + max(place.block for place in places if place.block is not None)
    names = {place.name for place in places}
    wanted = set[int | str]()
    for each in freeze:
        wanted.update(each if isinstance(each, range) else (each,))
    for each in wanted:
        if (each not in names) if isinstance(each, str) else not 0 <= each < blocks:
            raise ConfigError(
                f"freeze has {each!r}; give blocks 0 to {blocks - 1}, or names of layers, such as "
                f"{places[0].name!r} or {places[1].name!r}"
            )
    if train_last is not None:
        if not 0 <= train_last <= blocks:
            raise ConfigError(f"train_last = {train_last}, but the model has {blocks} blocks")
        wanted |= {places[0].name, *range(blocks - train_last)}
    return frozenset(
        index
        for index, place in enumerate(places)
        if place.name in wanted or (place.block is not None and place.block in wanted)
    )
