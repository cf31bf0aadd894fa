"""Checks an engine's inputs: batches, rates, placements."""

from __future__ import annotations

import math
from collections.abc import Collection
from numbers import Real
from typing import cast

from torch import Tensor

from dynmo.balance.partition import Partition
from dynmo.errors import ConfigError, InputError
from dynmo.runtime.state.layer_store import LayerStore


def check_batch(
    layer_store: LayerStore,
    inputs: object,
    targets: object,
    microbatches: int,
    needs_targets: bool = True,
) -> None:
    """Refuses a batch that this rank's stages cannot take.

    Args:
        layer_store: Knows this rank's stages.
        inputs: [microbatches, ...] on the rank of the first stage.
        targets: [microbatches, ...] on the rank of the last stage.
        microbatches: Number of expected microbatches.
        needs_targets: Whether the rank of the last stage must give targets.

    Raises:
        InputError: A tensor is missing, or has another first dimension.
    """
    stages, world = layer_store.own_stages, layer_store.world
    last = len(layer_store.layout.placement) - 1
    for name, batch, stage, holder in (
        ("inputs", inputs, 0, "first"),
        ("targets", targets, last, "last"),
    ):
        if batch is None:
            if stage in stages and (needs_targets or name == "inputs"):
                raise InputError(
                    f"{name} is None, but rank {world.rank} holds the {holder} stage; give it a "
                    "tensor [microbatches, ...]"
                )
            continue
        if not isinstance(batch, Tensor):
            raise InputError(
                f"{name} is a {type(batch).__name__}; give one tensor [microbatches, ...] "
                "(torch.stack, torch.as_tensor)"
            )
        if batch.dim() == 0 or len(batch) != microbatches:
            own = " of this replica's own" if world.replicas > 1 else ""
            count = len(batch) if batch.dim() else "no"
            raise InputError(
                f"{name}: {count} microbatches, shape {list(batch.shape)}, where "
                f"{microbatches}{own} are expected; the first dimension counts microbatches"
            )


def check_partition(partition: object) -> None:
    """Raises ConfigError if this is no Partition."""
    if not isinstance(partition, Partition):
        raise ConfigError(
            f"partition is a {type(partition).__name__}; give a Partition, such as Partition((4, "
            "4))"
        )


def check_recompute(recompute: object, layers: int) -> None:
    """Checks the layers that recompute.

    Args:
        recompute: A function, or indices of layers.
        layers: Number of layers of the model.

    Raises:
        ConfigError: It is neither a function nor a collection of such indices.
    """
    if callable(recompute):
        return
    if isinstance(recompute, str) or not isinstance(recompute, Collection):
        raise ConfigError(
            f"recompute = {recompute!r}; give the indices of layers, range({layers}) for all, or "
            "a function"
        )
    outside = [index for index in cast(Collection[object], recompute) if index not in range(layers)]
    if outside:
        raise ConfigError(
            f"recompute names layer {outside[0]!r}, but the model has {layers}, from 0 to "
            f"{layers - 1}"
        )


def check_choice(option: str, value: object, allowed: Collection[str]) -> None:
    """Checks the value of an option.

    Args:
        option: Name of the option, for the message.
        value: Its value.
        allowed: The values that are allowed.

    Raises:
        ConfigError: The value is not allowed.
    """
    if value not in allowed:
        raise ConfigError(f"{option} = {value!r}; choose from {', '.join(allowed)}")


def check_rates(lr: object, max_norm: object) -> None:
    """Checks the rates of a step.

    Args:
        lr: Learning rate. A finite number of at least 0.
        max_norm: Norm to clip to. A number of at least 0.

    Raises:
        InputError: One of them is not such a number.
    """
    if not isinstance(lr, Real) or not 0 <= float(lr) < math.inf:
        raise InputError(f"lr = {lr!r}; give a finite number of at least 0")
    if not isinstance(max_norm, Real) or not float(max_norm) >= 0:
        raise InputError(
            f"max_norm = {max_norm!r}; give a number of at least 0, where 0 clips nothing"
        )
