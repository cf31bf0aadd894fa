"""What a model computes in: float32, or bfloat16 or float16 with float32 masters.

    master (float32) --rounded--> parameter (low) --F, B, W--> gradient (float32) --optimizer-->
    master

Every float32 parameter is lowered, norms' weights too: torch's norms compute in float32 within, on
CUDA they take no mixture, and the master keeps what rounding hides. Buffers (rotary tables, running
statistics) stay as the model made them, for a table loses more by rounding than it saves; a module
casts them where it uses them. The loss is taken in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from dynmo.errors import ConfigError

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def lower(module: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Rounds the float32 parameters of a module in place; returns what they were, by name. Of
    float32 nothing changes."""
    masters: dict[str, Tensor] = {}
    if dtype == torch.float32:
        return masters
    for name, parameter in module.named_parameters():
        if parameter.dtype == torch.float32:
            masters[name] = parameter.data
            parameter.data = parameter.data.to(dtype)
    return masters


def dtype_for(precision: str, device: torch.device) -> torch.dtype:
    """Raises ConfigError where torch cannot train in this precision on the device: tried on a few
    numbers."""
    dtype = PRECISIONS[precision]
    check(dtype, device)
    return dtype


def check(dtype: torch.dtype, device: torch.device) -> None:
    if dtype == torch.float32:
        return
    name = str(dtype).removeprefix("torch.")
    try:
        if (
            device.type == "cuda"
            and dtype == torch.bfloat16
            and not torch.cuda.is_bf16_supported(including_emulation=False)
        ):
            raise RuntimeError("the device has no bfloat16 units")
        x = torch.ones(1, 1, 8, 8, device=device).to(dtype).requires_grad_()
        y = functional.scaled_dot_product_attention(
            x, functional.rms_norm(functional.linear(x, x[0, 0]), (8,)), x, is_causal=True
        )
        functional.silu(y).sum().backward()
    except (RuntimeError, TypeError) as error:
        what = str(error).splitlines()[0]
        raise ConfigError(
            f"train.precision = '{name}': torch {torch.__version__} cannot train in it on {device} ({what}); use 'float32'"
        ) from None
