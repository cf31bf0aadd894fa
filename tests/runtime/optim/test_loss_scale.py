"""The loss scaler on its own."""

from __future__ import annotations

import json

import torch
from hypothesis import given
from hypothesis import strategies as st

from dynmo.config.sections import TrainSection
from dynmo.runtime.optim.loss_scale import INITIAL, WINDOW, LossScaler, make_scaler


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 5), st.integers(0, 60))
def test_scale_halves_on_overflow_and_doubles_after_a_window(
    steps: list[bool], window: int, stop: int
) -> None:
    """A loaded scaler continues like one that never stopped."""
    scaler, expected, good = LossScaler(INITIAL, window), INITIAL, 0
    for step, finite in enumerate(steps):
        if step == stop:
            saved = json.loads(json.dumps(scaler.state()))
            scaler = LossScaler(INITIAL, window)
            scaler.load(saved)
        if not finite and not scaler.skips:
            assert expected == 1
            return
        scaler.observe(finite)
        good = good + 1 if finite else 0
        expected = expected / 2 if not finite else 2 * expected if good == window else expected
        good %= window
        assert scaler.scale == expected >= 1


def test_saved_count_above_a_shorter_window_doubles_the_scale() -> None:
    scaler = LossScaler(INITIAL, 3)
    scaler.load({"scale": 8.0, "good": 5})
    scaler.observe(True)
    assert scaler.scale == 16


def test_float16_is_scaled_by_default() -> None:
    assert TrainSection().loss_scale_window == WINDOW
    assert make_scaler(torch.float16, None, 7).dynamic
    assert make_scaler(torch.bfloat16, "dynamic", 7).dynamic
    for scaler, scale in (
        (make_scaler(torch.float32, None, 7), 1),
        (make_scaler(torch.float16, 1024.0, 7), 1024),
    ):
        assert not scaler.dynamic
        assert not scaler.skips
        scaler.observe(True)
        scaler.load({"scale": 4.0, "good": 0})
        assert scaler.scale == scale
