"""Optimizers of single layers, and their steps."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from dynmo.runtime.optim import fused
from dynmo.runtime.optim.optimizer import LayerOptimizer
from dynmo.runtime.optim.parameter_groups import Group, OptimizerSettings
from dynmo.runtime.optim.trial import Make
from dynmo.runtime.optim.update import Update


def settings(name: str, momentum: float = 0.9, **options: Any) -> OptimizerSettings:
    """Settings of one of dynmo's own optimizers."""
    return OptimizerSettings(
        partial(fused.SGD, momentum=momentum, **options)
        if name == "sgd"
        else partial(fused.AdamW, **options)
    )


def optimizer_of(module: nn.Module, make: Make = fused.AdamW, **options: Any) -> LayerOptimizer:
    group = Group(make)
    return LayerOptimizer(module, lambda _: group, **options)


def step(optimizer: LayerOptimizer, lr: float, factor: float = 1.0) -> None:
    Update().step({optimizer: factor}, lr)


def invert(optimizer: LayerOptimizer, lr: float) -> None:
    Update().invert([optimizer], lr)
