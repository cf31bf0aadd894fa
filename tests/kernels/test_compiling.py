"""A compiled layer computes what the layer computes in eager mode."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dynmo.errors import ConfigError
from dynmo.kernels.split import SplitLinear
from dynmo.models.gpt import FeedForwardHalf
from dynmo.models.options import ModelOptions
from dynmo.runtime.comm.clock import HostClock
from dynmo.runtime.layer.layer import Layer


@pytest.mark.matrix
def test_compiled_layer_equals_the_eager_layer() -> None:
    torch.manual_seed(0)
    sides = [FeedForwardHalf(ModelOptions(hidden=32, dropout=0.1)) for _ in range(2)]
    sides[1].load_state_dict(sides[0].state_dict())
    layers = [Layer(0, module, HostClock(), 0, i > 0) for i, module in enumerate(sides)]
    x, gy = torch.randn(2, 16, 32, requires_grad=True), torch.randn(2, 16, 32)
    results: list[list[torch.Tensor]] = []
    for layer, module in zip(layers, sides, strict=True):
        (y,) = layer.forward(0, (x,), 0)
        (gx,) = layer.backward_input(0, (gy,), deferred=True)
        assert module.down.weight.grad is None, "W comes later"
        layer.backward_weight(0)
        results.append([y, gx, *(p.grad for p in module.parameters() if p.grad is not None)])
    assert len(results[0]) == 5
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
    assert layers[0].meter.activation_bytes > 0
    # Compiled, less is kept: what lies between the linears is computed again.
    assert 0 < layers[1].meter.activation_bytes <= layers[0].meter.activation_bytes
    assert isinstance(sides[1].down, SplitLinear)


def test_missing_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    def missing() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", missing)
    with pytest.raises(ConfigError, match=r"train.compile"):
        Layer(0, nn.Linear(2, 2), HostClock(), 0, True)
