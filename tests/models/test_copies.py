"""Layers with attributes that cannot be copied."""

from __future__ import annotations

import math
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import dynmo
from dynmo.errors import ConfigError
from dynmo.models.copies import as_fakes, without_memory
from tests.pool import Pool


class Locked(nn.Linear):
    """Keeps an object beside its weights, and computes under a lock."""

    def __init__(self, held: Any = None) -> None:
        super().__init__(8, 8)
        self.held, self.lock = held, threading.Lock()

    def forward(self, input: Tensor) -> Tensor:
        with self.lock:
            return super().forward(input)


HELD: dict[str, Callable[[], Any]] = {
    "module": lambda: math,
    "event": threading.Event,
    "queue": queue.Queue,
    "thread": lambda: threading.Thread(target=print),
    "file": lambda: sys.__stdout__,
    "generator": lambda: iter(x for x in "ab"),
}


@pytest.mark.parametrize("what", HELD)
def test_what_cannot_be_copied_is_shared(what: str) -> None:
    held = HELD[what]()
    layer = Locked({"list": [held, torch.ones(2) * nn.Parameter(torch.ones(2))]})
    copy = without_memory(layer)
    assert isinstance(copy, Locked)
    assert copy.held["list"][0] is held
    assert copy.held["list"] is not layer.held["list"]
    assert copy.lock is layer.lock
    assert copy.weight.is_meta
    assert not layer.weight.is_meta
    with FakeTensorMode():
        assert as_fakes(layer).held["list"][0] is held  # pyright: ignore[reportArgumentType, reportCallIssue, reportIndexIssue, reportOptionalSubscript]


class Single(nn.Linear):
    def __deepcopy__(self, memo: object) -> Single:
        raise TypeError("there is one of it")


def test_layer_that_refuses_copies_is_named() -> None:
    model = dynmo.Sequential([nn.Linear(8, 8), Single(8, 8)])
    with pytest.raises(ConfigError, match=r"layer 1 \(Single\) cannot be copied .*there is one"):
        model.build({0})


def moved(world: dynmo.World) -> dict[str, Any]:
    torch.manual_seed(0)
    layers = [Locked(math), Locked(threading.Event()), Locked(), Locked(math)]
    model = dynmo.Sequential(layers, nn.functional.mse_loss)
    pipeline = dynmo.Pipeline(model, world, microbatches=2, balance="none")
    losses = list[float]()
    for counts in ((1, 3), (3, 1), (2, 2)):
        if world.size > 1:
            pipeline.move(counts)
        losses.append(pipeline.step(torch.ones(4, 8), torch.zeros(4, 8)).loss)
    return {"losses": losses, "digest": pipeline.digest()}


def test_layers_with_locks_and_modules_move(pool: Pool) -> None:
    (alone,) = pool.run("tests.models.test_copies:moved", 1)
    assert pool.run("tests.models.test_copies:moved", 2) == [alone] * 2
