"""Options of the optimizer, and of its learning rate over a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from dynmo.options import OWN, BelowOne, Lax, NonNegative, Options, Positive, Share, Whole, written

if TYPE_CHECKING:
    Betas: TypeAlias = Sequence[float]
else:
    Betas = Annotated[tuple[BelowOne, BelowOne], Lax]


class AdamW(Options):
    """AdamW (Loshchilov and Hutter, 2019), with the defaults of `torch.optim.AdamW`.

    Weight decay acts only on parameters of two or more dimensions, unless `groups` sets it.
    """

    lr: NonNegative = 1e-3
    """Peak learning rate."""
    weight_decay: NonNegative = 0.01
    """Weight decay of the optimizer."""
    betas: Betas = (0.9, 0.999)
    """AdamW's two decay rates."""
    eps: Positive = 1e-8
    """AdamW's epsilon."""


class SGD(Options):
    """Stochastic gradient descent, with the defaults of `torch.optim.SGD`.

    Weight decay acts only on parameters of two or more dimensions, unless `groups` sets it.
    """

    lr: NonNegative = 1e-3
    """Peak learning rate."""
    weight_decay: NonNegative = 0.0
    """Weight decay of the optimizer."""
    momentum: BelowOne = 0.0
    """SGD's momentum."""


TorchOptimizer: TypeAlias = Literal[
    "adadelta",
    "adafactor",
    "adagrad",
    "adam",
    "adamax",
    "asgd",
    "muon",
    "nadam",
    "radam",
    "rmsprop",
    "rprop",
]
"""Classes of `torch.optim` in lower case, beside those that dynmo has itself."""
OwnOptimizer: TypeAlias = Annotated[str, written(OWN, "python:package.module:function")]


class NamedOptimizer(Options):
    """An optimizer of torch, or of the user's own, by its name."""

    name: TorchOptimizer | OwnOptimizer
    """A class of `torch.optim` in lower case, or `python:package.module:function`."""
    lr: NonNegative = 1e-3
    """Peak learning rate."""


class LearningRate(Options):
    """The learning rate over the steps of a run."""

    warmup: Whole = 0
    """Steps in which the learning rate rises to `lr`."""
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate falls after the warmup. `cosine` and `linear` end at `min_lr_ratio`
    of `lr` in the last of `steps`."""
    min_lr_ratio: Share = 0.1
    """Learning rate of the last step, as a share of `lr`. transformers' cosine ends at 0."""

    def at(self, step: int, steps: int, peak: float) -> float:
        """Returns the learning rate of a step. A pure function of the step.

        It rises linearly over `warmup` steps. Then it decays to `peak * min_lr_ratio` at the last
        step.

        Args:
            step: Number of the step.
            steps: Number of steps of the run.
            peak: The largest rate.
        """
        if step < self.warmup:
            return peak * (step + 1) / self.warmup
        if self.decay == "constant" or steps <= self.warmup + 1:
            return peak
        done = min(1.0, (step - self.warmup) / (steps - 1 - self.warmup))
        left = 1 - done if self.decay == "linear" else 0.5 * (1 + math.cos(math.pi * done))
        return peak * (self.min_lr_ratio + (1 - self.min_lr_ratio) * left)
