"""Lowering of the precision, and the error if the backend lacks a precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dynmo.errors import ConfigError
from dynmo.kernels.deferral import install
from dynmo.kernels.split import WeightTape
from dynmo.runtime.optim.precision import PRECISIONS, dtype_for, lower


def test_only_float32_parameters_are_lowered() -> None:
    """Of a shared parameter, a frozen one, a buffer and an integer."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
    weight = second.weight = first.weight
    first.bias.requires_grad_(False)
    ids = nn.Parameter(torch.arange(3), requires_grad=False)
    module = nn.ModuleDict({"first": first, "second": second})
    module.register_parameter("ids", ids)
    module.register_buffer("table", torch.ones(4))
    before = weight.detach().clone()
    masters = lower(module, torch.bfloat16)
    assert set(masters) == {"first.weight"}, "what does not train has none"
    assert torch.equal(masters["first.weight"], before)
    assert first.weight is second.weight is weight
    assert torch.equal(weight, before.bfloat16())
    assert {n: p.requires_grad for n, p in module.named_parameters()} == {
        "ids": False,
        "first.weight": True,
        "first.bias": False,
    }
    assert (ids.dtype, module.get_buffer("table").dtype) == (torch.int64, torch.float32)
    assert lower(nn.Linear(2, 2), torch.float32) == {}


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_are_float32(dtype: torch.dtype, deferred: bool) -> None:
    """In low precision, a large sum would lose the part of one microbatch."""
    module = nn.Sequential(nn.Embedding(5, 8), nn.LayerNorm(8), nn.Linear(8, 3), nn.PReLU())
    lower(module, dtype)
    tape = WeightTape()
    tape.deferred = deferred
    install(module, tape)

    def backward(scale: float) -> None:
        module(torch.arange(5)).float().mul(scale).sum().backward()
        for work, _ in tape.take():
            work()

    for _ in range(3):
        backward(1.0)
    for parameter in module.parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
        parameter.grad.fill_(1e4)
    backward(0.01)
    bias: Any = module.get_parameter("2.bias").grad
    assert 0 < float(bias[0]) - 1e4 < 0.1


def test_only_supported_precisions_pass_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {name: dtype_for(name, torch.device("cpu")) for name in PRECISIONS} == PRECISIONS
    monkeypatch.setitem(PRECISIONS, "float8_e4m3fn", torch.float8_e4m3fn)
    with pytest.raises(ConfigError, match=r"train.precision = 'float8_e4m3fn'"):
        dtype_for("float8_e4m3fn", torch.device("cpu"))
