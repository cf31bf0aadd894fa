"""Low precision and recomputation on a CUDA device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dynmo.kernels.deferral import install
from dynmo.kernels.split import WeightTape
from dynmo.runtime.optim.precision import lower
from tests.gpu.one_rank import trained

MODEL = {"blocks": 2, "hidden": 64, "heads": 4, "sequence": 32, "dropout": 0.1}


def losses(device: torch.device, **train: Any) -> list[float]:
    train = {"steps": 6, "global_batch": 8, "micro_batch": 2, "lr": 1e-3} | train
    return trained(device, {"model": MODEL, "train": train})["losses"]


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_low_precision_loss_is_close_to_float32(device: torch.device, precision: str) -> None:
    assert losses(device, precision=precision) == pytest.approx(losses(device), rel=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_recomputed_activations_give_the_same_losses(device: torch.device, precision: str) -> None:
    kept, recomputed = (losses(device, precision=precision, recompute=x) for x in ("none", "all"))
    assert recomputed == pytest.approx(kept, rel=1e-5)


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_w_sums_are_float32(dtype: torch.dtype) -> None:
    """torch.mm with out_dtype does not round the product to the lower precision."""
    linear = nn.Linear(64, 32, device="cuda")
    lower(linear, dtype)
    install(linear, WeightTape())
    x, gy = (torch.randn(256, width, device="cuda").to(dtype) for width in (64, 32))
    linear(x.requires_grad_()).backward(gy)
    assert linear.weight.grad is not None
    assert linear.weight.grad.dtype == torch.float32
    torch.testing.assert_close(
        linear.weight.grad, gy.float().t() @ x.detach().float(), rtol=1e-3, atol=1e-3
    )
