"""Lowering of the precision, and the error if the backend lacks a precision."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dynmo.errors import ConfigError
from dynmo.kernels.deferral import install
from dynmo.kernels.split import WeightTape
from dynmo.runtime.layer.precision import PRECISIONS, check, dtype_for, lower


class Own(nn.Module):
    """A shared parameter, a frozen one, a buffer, an integer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.ids = nn.Parameter(torch.arange(3), requires_grad=False)
        self.first.bias.requires_grad_(False)
        self.register_buffer("table", torch.ones(4))


def test_only_float32_parameters_are_lowered() -> None:
    module = Own()
    weight = module.first.weight
    before = weight.detach().clone()
    masters = lower(module, torch.bfloat16)
    assert set(masters) == {"first.weight"}, "what does not train has none"
    assert torch.equal(masters["first.weight"], before)
    assert module.first.weight is module.second.weight is weight
    assert torch.equal(weight, before.bfloat16())
    assert [p.requires_grad for p in module.parameters()] == [False, True, False]
    assert (module.ids.dtype, module.get_buffer("table").dtype) == (torch.int64, torch.float32)
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
    for _ in range(3):
        module(torch.arange(5)).float().sum().backward()
        for work, _ in tape.take():
            work()
    for parameter in module.parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
        parameter.grad.fill_(1e4)
    module(torch.arange(5)).float().mul(0.01).sum().backward()
    for work, _ in tape.take():
        work()
    linear = module[2]
    assert isinstance(linear, nn.Linear)
    assert linear.bias.grad is not None
    assert 0 < float(linear.bias.grad[0]) - 1e4 < 0.1


def test_supported_precisions_pass_the_check() -> None:
    assert [dtype_for(name, torch.device("cpu")) for name in PRECISIONS] == list(
        PRECISIONS.values()
    )


def test_unsupported_precision_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train.precision = 'float8_e4m3fn'"):
        check(torch.float8_e4m3fn, torch.device("cpu"))
