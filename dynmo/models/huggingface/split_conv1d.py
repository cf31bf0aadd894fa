"""Conv1D of transformers, a linear layer whose weight is [in, out], with a W that waits.

`kernels/products.py` knows its product too, but asks at each call of torch in its forward.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from dynmo.kernels.split import WeightTape, may_split, note, split_linear


class SplitConv1D(Conv1D):
    tape: WeightTape | None = None

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = cast(nn.Parameter, self.weight), cast(nn.Parameter, self.bias)
        if self.tape is None or not weight.requires_grad or not may_split(self, x.device):
            return super().forward(x)
        rows = x.view(-1, x.shape[-1])
        if self.tape.notes(weight):
            y = note(self.tape, torch.addmm(bias, rows, weight), rows, weight, bias, turned=True)
        else:
            width, outputs = weight.shape
            y = split_linear(rows, weight, bias, self.tape, ((outputs, width), (1, outputs), 0))
        return y.view(*x.shape[:-1], y.shape[-1])
