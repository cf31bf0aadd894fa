"""Emulated layers: real layers that take a configured time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dynmo.kernels.deferral import install
from dynmo.kernels.split import WeightTape
from dynmo.models import emulated
from dynmo.models.emulated import EmulatedLayer, Pace, make, make_layers, mean_loss
from dynmo.models.options import ModelOptions

Seconds = Callable[[Callable[[], object]], float]


class Clock:
    """Passes a microsecond each time that somebody looks, and the seconds of a sleep."""

    now = 0.0

    def perf_counter(self) -> float:
        self.now += 1e-6
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> Seconds:
    """Returns the seconds that a call takes, in tenths of milliseconds."""
    clock = Clock()
    monkeypatch.setattr(emulated, "time", clock)

    def taken(act: Callable[[], object]) -> float:
        start = clock.now
        act()
        return round(clock.now - start, 4)

    return taken


def test_emulated_ops_take_the_configured_time(seconds: Seconds) -> None:
    layer = EmulatedLayer(0.004, 0.006, 0.008, 8)
    tape = WeightTape()
    tape.deferred = True
    install(layer, tape)
    y = layer(torch.randn(8, requires_grad=True))
    assert seconds(lambda: layer(torch.randn(8))) == 0.004
    assert seconds(y.sum().backward) == 0.006
    ((work, holds),) = tape.take()
    assert [tuple(t.shape) for t in holds] == [(8,), (8,)]
    assert seconds(work) == 0.008


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


def test_frozen_emulated_layer_runs_b_only(seconds: Seconds) -> None:
    layer = EmulatedLayer(0, 0.002, 0.5, 8)
    install(layer, WeightTape())
    layer.a.requires_grad_(False)
    x = torch.randn(8, requires_grad=True)
    assert seconds(layer(x).sum().backward) == 0.002
    assert x.grad is not None


def test_token_ids_become_a_message() -> None:
    layer = EmulatedLayer(0, 0, 0, 5)
    a, b = layer(torch.tensor([[1, 2], [3, 4]])), layer(torch.tensor([[1, 2], [3, 5]]))
    assert (a.shape, a.dtype) == ((5,), torch.float32)
    assert not torch.equal(a, b), "another batch is another loss"
    assert mean_loss(a, torch.zeros(2)) == a.mean()


def test_emulated_model_follows_the_config() -> None:
    seconds = {"f": 0.001, "b": [0.001, 0.002, 0.003], "w": 0.0}
    wanted = {"kind": "emulated", "layers": 3, "bytes": 64} | seconds
    model = make(ModelOptions.model_validate(wanted), 0, {})
    assert model.names == ("emulated.0", "emulated.1", "emulated.2")
    for x, b in zip(model.build(range(3)), (0.001, 0.002, 0.003), strict=True):
        assert isinstance(x, EmulatedLayer)
        assert (x.f, x.b, x.w, x.size) == (0.001, b, 0.0, 16)
    with pytest.raises(ValueError):
        make_layers([0.1], [0.1, 0.1], [0.1], 8)


def test_a_slow_process_takes_longer(seconds: Seconds, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ModelOptions(kind="emulated", layers=2, f=0.002, b=0.0, w=0.0, speeds=(1.0, 0.25))
    for rank, wanted in (("0", 0.002), ("1", 0.008), ("2", 0.002)):
        monkeypatch.setenv("RANK", rank)
        model = make(options, 0, {})
        assert model.work == ((0.002, 0.0, 0.0),) * 2
        layer = model.build((0,))[0]
        assert seconds(lambda layer=layer: layer(torch.ones(8))) == wanted


def test_speed_changes_between_steps(seconds: Seconds) -> None:
    pace, x = Pace(), torch.ones(8, requires_grad=True)
    layer = make_layers([0.001], [0.004], [0.0], 8, pace=pace).build((0,))[0]
    for pace.speed in (1.0, 0.25):
        assert seconds(layer(x).backward) == 0.004 / pace.speed
