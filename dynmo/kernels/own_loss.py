"""A layer's own loss beside the model's, for a router that predicts or balances.

Its gradient starts in the layer's own B, so nothing travels between ranks. The gradient has the
weight that the model's loss has there (its share of the step, times the loss scale). The loss that
a run reports does not include it.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from dynmo.kernels.split import WeightTape


class _AddLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, tape: WeightTape | None) -> Tensor:
        ctx.tape, ctx.dtype = tape, loss.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        share = (
            torch.ones((), device=gradients[0].device) if ctx.tape is None else ctx.tape.loss_share
        )
        return gradients[0], share.to(ctx.dtype), None


def add_loss(x: Tensor, loss: Tensor, tape: WeightTape | None) -> Tensor:
    """Return `x`. Its backward also runs the backward of a loss.

    Args:
        x: The layer's output.
        loss: The mean over a microbatch, a tensor without dimensions.
        tape: The layer's tape. None means that the model's loss has the weight 1.
    """
    return cast(Tensor, _AddLoss.apply(x, loss, tape))
