"""The set-up: what a rank says of it, and what is no time of a step."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import dynmo
from dynmo.runtime.comm import worker
from dynmo.runtime.comm.worker import said_while
from dynmo.runtime.engine.programs import Programs


def test_rank_says_what_it_does(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "EVERY", 0.01)
    with said_while(3, "reads its data"):
        while len(caplog.messages) < 2:
            time.sleep(0.01)
    assert set(caplog.messages) == {"rank 3 reads its data: 0 s so far"}
    with said_while(3, "reads its data", is_setup=False):
        time.sleep(0.03)
    assert len(caplog.messages) < 10


def test_first_schedule_is_no_time_of_a_step() -> None:
    """Its loops may compile for half a minute."""
    late, now, made = 0.0, time.perf_counter, Programs.executor

    def slow(self: Programs, *given: Any) -> Any:
        nonlocal late
        late = 1000.0
        return made(self, *given)

    def clock() -> float:
        return now() + late

    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    model = dynmo.Sequential(layers, nn.functional.mse_loss)
    with dynmo.init(device="cpu") as world, mock.patch.object(Programs, "executor", slow):
        pipeline = dynmo.Pipeline(model, world, microbatches=2)
        pipeline.adapt()
        with mock.patch.object(time, "perf_counter", clock):
            result = pipeline.step(torch.ones(4, 4), torch.zeros(4, 4))
    assert late
    assert result.seconds < late
