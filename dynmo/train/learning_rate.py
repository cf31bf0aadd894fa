"""The learning rate of each step."""

from __future__ import annotations

import math

from dynmo.config import TrainSection


def learning_rate(train: TrainSection, step: int) -> float:
    """Returns the learning rate of a step. A pure function of the step.

    It rises linearly over `warmup` steps. Then it decays to `lr * min_lr_ratio` at the last step.

    Args:
        train: Section `[train]` of the config.
        step: Number of the step.
    """
    if step < train.warmup:
        return train.lr * (step + 1) / train.warmup
    if train.decay == "constant" or train.steps <= train.warmup + 1:
        return train.lr
    done = (step - train.warmup) / (train.steps - 1 - train.warmup)
    left = 1 - done if train.decay == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return train.lr * (train.min_lr_ratio + (1 - train.min_lr_ratio) * left)
