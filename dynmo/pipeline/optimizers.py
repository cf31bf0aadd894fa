"""The settings of the optimizers, and a handle for learning-rate schedulers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dynmo.errors import ConfigError
from dynmo.pipeline.options import SGD, AdamW
from dynmo.runtime.optim.optimizer import OptimizerSettings


def settings_of(optimizer: AdamW | SGD) -> OptimizerSettings:
    if isinstance(optimizer, SGD):
        return OptimizerSettings(
            "sgd", weight_decay=optimizer.weight_decay, momentum=optimizer.momentum
        )
    return OptimizerSettings("adamw", optimizer.weight_decay, optimizer.betas, optimizer.eps)


class OptimizerHandle(torch.optim.Optimizer):
    """Holds the learning rate of a pipeline's optimizer for torch's schedulers.

    `param_groups[0]["lr"]` is the rate of the next step. `step` and `zero_grad` of this object do
    nothing. The weights and the optimizer's state stay with the ranks that hold the layers.
    """

    def __init__(self, lr: float) -> None:
        # torch refuses an optimizer without parameters.
        super().__init__([torch.zeros(0, requires_grad=True)], {"lr": lr})

    @property
    def lr(self) -> float:
        if len(self.param_groups) > 1:
            raise _one_group()
        # torch's schedulers keep rates beside it, such as `initial_lr`.
        for key in self.param_groups[0]:
            if key != "params" and not key.endswith("lr"):
                raise ConfigError(
                    f"pipeline.optimizer: {key!r} has no effect there, only 'lr' has; give it to "
                    "dynmo.AdamW or dynmo.SGD"
                )
        return float(self.param_groups[0]["lr"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self.param_groups:
            raise _one_group()
        # torch's own method imports its compiler, which takes a second.
        self.param_groups.append({**self.defaults, **param_group})

    def step(self, closure: Callable[[], Any] | None = None) -> Tensor | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Does nothing. `Pipeline.step` calls it, so that schedulers see the order they expect."""
        return None


def _one_group() -> ConfigError:
    return ConfigError(
        "pipeline.optimizer has one group, the learning rate of all layers, and takes no other; "
        "pipeline.freeze keeps layers from training"
    )
