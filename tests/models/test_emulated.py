"""Emulated layers: real layers that take a configured time."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from dynmo.kernels.deferral import install
from dynmo.kernels.split import WeightTape
from dynmo.models.emulated import EmulatedLayer, Pace, make, make_layers, mean_loss
from dynmo.models.options import ModelOptions


def seconds(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def test_emulated_ops_take_the_configured_time() -> None:
    layer = EmulatedLayer(0.004, 0.006, 0.008, 8)
    tape = WeightTape()
    tape.deferred = True
    install(layer, tape)
    x = torch.randn(8, requires_grad=True)
    tries: list[tuple[float, float, float]] = []
    for _ in range(7):  # another process may hold the core in one of them
        y = layer(x)
        parts = seconds(lambda: layer(x)), seconds(y.sum().backward)
        ((work, holds),) = tape.take()
        tries.append((*parts, seconds(work)))
        assert [tuple(t.shape) for t in holds] == [(8,), (8,)]
    for measured, wanted in zip(zip(*tries, strict=True), (0.004, 0.006, 0.008), strict=True):
        assert wanted <= min(measured) < wanted + 0.02


@pytest.mark.parametrize("tape", [None, WeightTape()])
def test_emulated_layer_has_correct_gradients(tape: WeightTape | None) -> None:
    layer = EmulatedLayer(0, 0, 0, 8)
    install(layer, tape)
    a = layer.a.detach().clone().requires_grad_()
    for _ in range(2):
        x = torch.randn(8, requires_grad=True)
        gy = torch.randn(8)
        layer(x).backward(gy)
        own, x.grad = x.grad, None
        (x * (1 + a / 1000)).backward(gy)
        assert x.grad is not None
        torch.testing.assert_close(own, x.grad)
    torch.testing.assert_close(layer.a.grad, a.grad)


def test_frozen_emulated_layer_runs_b_only() -> None:
    layer = EmulatedLayer(0, 0.002, 0.5, 8)
    install(layer, WeightTape())
    layer.a.requires_grad_(False)
    x = torch.randn(8, requires_grad=True)
    assert 0.002 <= seconds(layer(x).sum().backward) < 0.4
    assert x.grad is not None


def test_token_ids_become_a_message() -> None:
    layer = EmulatedLayer(0, 0, 0, 5)
    a, b = layer(torch.tensor([[1, 2], [3, 4]])), layer(torch.tensor([[1, 2], [3, 5]]))
    assert a.shape == (5,)
    assert a.dtype == torch.float32
    assert not torch.equal(a, b), "another batch is another loss"
    assert mean_loss(a, torch.zeros(2)) == a.mean()


def test_emulated_model_follows_the_config() -> None:
    wanted = {
        "kind": "emulated",
        "layers": 3,
        "f": 0.001,
        "b": [0.001, 0.002, 0.003],
        "w": 0.0,
        "bytes": 64,
    }
    model = make(ModelOptions.model_validate(wanted), 0, {})
    layers = model.build(range(3))
    assert model.names == ("emulated.0", "emulated.1", "emulated.2")
    assert [(x.f, x.b, x.w, x.size) for x in layers if isinstance(x, EmulatedLayer)] == [
        (0.001, 0.001, 0.0, 16),
        (0.001, 0.002, 0.0, 16),
        (0.001, 0.003, 0.0, 16),
    ]
    with pytest.raises(ValueError):
        make_layers([0.1], [0.1, 0.1], [0.1], 8)


def test_a_slow_process_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ModelOptions(kind="emulated", layers=2, f=0.002, b=0.0, w=0.0, speeds=(1.0, 0.25))
    for rank, least in (("0", 0.002), ("1", 0.008), ("2", 0.002)):
        monkeypatch.setenv("RANK", rank)
        model = make(options, 0, {})
        assert model.work == ((0.002, 0.0, 0.0),) * 2
        layer = model.build((0,))[0]
        taken = min(seconds(lambda layer=layer: layer(torch.ones(8))) for _ in range(5))
        assert least <= taken < 2 * least


def test_speed_changes_between_steps() -> None:
    pace = Pace()
    layer = make_layers([0.001], [0.004], [0.0], 8, pace=pace).build((0,))[0]
    x = torch.ones(8, requires_grad=True)
    taken: list[float] = []
    for pace.speed in (1.0, 0.25):
        taken.append(min(seconds(layer(x).backward) for _ in range(5)))
    assert 0.004 <= taken[0] < 0.012 < 0.016 <= taken[1]
