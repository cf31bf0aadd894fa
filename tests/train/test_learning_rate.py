"""The learning rate: warm-up, and the decay to the last step."""

from __future__ import annotations

import math
from typing import Any

import pytest

from dynmo.config.sections import TrainSection


def rates(**changes: Any) -> list[float]:
    train = TrainSection.model_validate(
        {"steps": 11, "lr": 1.0, "warmup": 0, "min_lr_ratio": 0.1} | changes
    )
    return [train.at(step, train.steps, train.lr) for step in range(train.steps)]


def test_learning_rate_warms_up_and_decays() -> None:
    assert rates(decay="constant") == [1.0] * 11
    assert rates(decay="linear") == pytest.approx([1 - 0.9 * i / 10 for i in range(11)])
    cosine = rates(decay="cosine")
    assert cosine == pytest.approx(
        [0.1 + 0.9 * (1 + math.cos(math.pi * i / 10)) / 2 for i in range(11)]
    )
    assert (cosine[0], cosine[-1]) == (1.0, pytest.approx(0.1))
    assert rates(warmup=4, decay="constant")[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    warmed = rates(warmup=4, decay="linear")
    assert warmed[3] == warmed[4] == 1.0
    assert warmed[-1] == pytest.approx(0.1)
    assert rates(steps=50, warmup=7)[-1] == pytest.approx(0.1)
    assert rates(min_lr_ratio=0.0)[-1] == 0.0
    # Warm-up to the end, or all but one step: no division by zero, no rate above.
    for warmup in (10, 11, 20):
        assert all(0 < rate <= 1 for rate in rates(warmup=warmup))
    assert rates(steps=1) == [1.0]
