"""Precision of a model: float32, or bfloat16 or float16 with float32 masters.

    master (float32) --rounded--> parameter (low) --F, B, W--> gradient (float32) --optimizer-->
    master

Every float32 parameter is lowered, norms' weights too. Inside, torch's norms compute in float32. On
CUDA they take no mixture. The master keeps the bits that rounding hides. Only a parameter that
trains has one. Buffers (rotary tables, running statistics) stay as the model made them. A table
would lose more by rounding than it saves. A module casts buffers when it uses them. A model of
transformers has the types that transformers gives it. The loss is taken in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from dynmo.errors import ConfigError

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def lower(module: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Rounds the float32 parameters of a module. Returns the values before of those that train.

    A module may have a method `types_in`. It takes the precision, and returns the types of those
    parameters and buffers that it decides about, by name.
    """
    masters: dict[str, Tensor] = {}
    if dtype == torch.float32:
        return masters
    decides: Callable[[torch.dtype], Mapping[str, torch.dtype]]
    decides = getattr(module, "types_in", lambda _: {})
    types = decides(dtype)
    for name, parameter in module.named_parameters():
        if parameter.dtype == torch.float32 and types.get(name, dtype) == dtype:
            if parameter.requires_grad:
                masters[name] = parameter.data
            parameter.data = parameter.data.to(dtype)
    for name, buffer in module.named_buffers():
        buffer.data = buffer.data.to(types.get(name, buffer.dtype))
    return masters


def dtype_for(precision: str, device: torch.device) -> torch.dtype:
    """Returns the type of a key of `PRECISIONS`, after a trial on the device.

    Raises:
        ConfigError: torch cannot train in this precision on the device.
    """
    dtype = PRECISIONS[precision]
    if dtype == torch.float32:
        return dtype
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
            f"train.precision = '{precision}': torch {torch.__version__} cannot train in it on "
            f"{device} ({what}); use 'float32'"
        ) from None
    return dtype
