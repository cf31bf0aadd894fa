"""Low precision and recomputation on a CUDA device.

The code path is the same, with the tolerance that other kernels need.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dynmo.config import parse
from dynmo.events import EndEvent, Event, StepEvent
from dynmo.kernels.deferral import install
from dynmo.kernels.split import WeightTape
from dynmo.runtime.comm.world import World
from dynmo.runtime.layer.precision import lower
from dynmo.train.setup import model_of
from dynmo.train.trainer import Trainer
from tests.jobs import SOURCE

MODEL = {"blocks": 2, "hidden": 64, "heads": 4, "sequence": 32, "dropout": 0.1}


def run(device: torch.device, **train: Any) -> tuple[list[float], str]:
    """The losses, and the digest of the weights."""
    train = {"steps": 6, "global_batch": 8, "micro_batch": 2, "lr": 1e-3} | train
    config = parse({"data": {"source": SOURCE}, "model": MODEL, "train": train})
    events: list[Event] = []
    with tempfile.TemporaryDirectory() as folder:
        world = World.join(dist.FileStore(str(Path(folder) / "store"), 1), 0, 1, device=device)
        try:
            Trainer(config, world, model_of(config), None, listen=events.append).run()
        finally:
            world.close()
    (end,) = [event for event in events if isinstance(event, EndEvent)]
    return [event.loss for event in events if isinstance(event, StepEvent)], end.weights_digest


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_low_precision_loss_is_close_to_float32(device: torch.device, precision: str) -> None:
    assert run(device, precision=precision)[0] == pytest.approx(run(device)[0], rel=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_recomputed_activations_give_the_same_losses(device: torch.device, precision: str) -> None:
    assert run(device, precision=precision, recompute="all")[0] == pytest.approx(
        run(device, precision=precision)[0], rel=1e-5
    )


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
