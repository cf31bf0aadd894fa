"""The optimizers for users, and a handle for learning-rate schedulers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor

from dynmo.config import TrainSection
from dynmo.errors import ConfigError
from dynmo.runtime.optim.optimizer import OptimizerSettings

# A user's own loop and [train] of a config share these defaults.
_DEFAULTS = TrainSection()


@dataclass(frozen=True)
class AdamW:
    """AdamW (Loshchilov and Hutter, 2019).

    Weight decay acts on parameters of two or more dimensions.

    Attributes:
        lr: Learning rate of the first step. A scheduler changes it through `Pipeline.optimizer`.
        weight_decay: Share of a weight that a step takes away, times the learning rate.
        betas: Decay of the two moving averages.
        eps: Added to the denominator.
    """

    lr: float = _DEFAULTS.lr
    weight_decay: float = _DEFAULTS.weight_decay
    betas: tuple[float, float] = _DEFAULTS.betas
    eps: float = _DEFAULTS.eps

    @property
    def settings(self) -> OptimizerSettings:
        """The options that the runtime takes."""
        return OptimizerSettings(
            "adamw", weight_decay=self.weight_decay, betas=self.betas, eps=self.eps
        )


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent with momentum.

    Weight decay acts on parameters of two or more dimensions.

    Attributes:
        lr: Learning rate of the first step. A scheduler changes it through `Pipeline.optimizer`.
        momentum: Decay of the moving sum of gradients. 0 keeps none.
        weight_decay: Factor of the weight that is added to its gradient.
    """

    lr: float = 0.1
    momentum: float = _DEFAULTS.momentum
    weight_decay: float = 0.0

    @property
    def settings(self) -> OptimizerSettings:
        """The options that the runtime takes."""
        return OptimizerSettings("sgd", weight_decay=self.weight_decay, momentum=self.momentum)


def optimizer_settings(train: TrainSection) -> OptimizerSettings:
    """The optimizer that `[train]` of a config asks for."""
    name = cast(Literal["adamw", "sgd"], train.optimizer)
    return OptimizerSettings(name, train.weight_decay, train.betas, train.eps, train.momentum)


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
        """Learning rate of the next step.

        Raises:
            ConfigError: There are other groups, or other options than rates.
        """
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
        """Refuses groups beyond the one that holds the learning rate.

        Raises:
            ConfigError: It is not the first group.
        """
        if self.param_groups:
            raise _one_group()
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Tensor | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Does nothing.

        `Pipeline.step` calls it, so that schedulers see the order they expect.
        """
        return None


def _one_group() -> ConfigError:
    return ConfigError(
        "pipeline.optimizer has one group, the learning rate of all layers, and takes no other; "
        "pipeline.freeze keeps layers from training"
    )
