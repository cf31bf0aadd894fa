"""Precision of a model: float32, or bfloat16 or float16 with float32 masters.

    master (float32) --rounded--> parameter (low) --F, B, W--> gradient (float32) --optimizer-->
    master

Every float32 parameter is lowered, norms' weights too. Inside, torch's norms compute in float32. On
CUDA they take no mixture. The master keeps the bits that rounding hides. Only a parameter that
trains has one. Buffers (rotary tables, running statistics) stay as the model made them. A table
would lose more by rounding than it saves. A module casts buffers when it uses them. A model of
transformers has the types that transformers gives it. The loss is taken in float32.

B starts from the loss times a scale, so that small gradients do not vanish in float16:

    step       0 ... 1999      2000 ... 3999       4000    4001 ...
    scale      65536           131072              262144  131072
    gradients  finite          finite              inf     finite

The scale doubles after every window of good steps. An overflow halves it, and its step is skipped.
The gradients are divided again before anyone reads them. A power of two changes no bits, except for
bits that would be lost without it.
"""

from __future__ import annotations

import math
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
        x = torch.ones(1, 1, 8, 8, device=device).to(dtype).requires_grad_()
        y = functional.scaled_dot_product_attention(
            x, functional.rms_norm(functional.linear(x, x[0, 0]), (8,)), x, is_causal=True
        )
        functional.silu(y).sum().backward()
        is_emulated = (
            device.type == "cuda"
            and dtype == torch.bfloat16
            and not torch.cuda.is_bf16_supported(including_emulation=False)
        )
        what = "the device has no bfloat16 units" if is_emulated else None
    except (RuntimeError, TypeError) as error:
        what = str(error).splitlines()[0]
    if what is not None:
        raise ConfigError(
            f"train.precision = '{precision}': torch {torch.__version__} cannot train in it on "
            f"{device} ({what}); use 'float32'"
        )
    return dtype


INITIAL = 2.0**16
WINDOW = 2000  # good steps until a dynamic scale doubles
_LARGEST = 2.0**64  # float32 gradients times this are still far from its end


class LossScaler:
    """The scale of the loss, and the rule that changes it.

    Args:
        scale: First factor of the loss, a power of two. 1 means no scaling.
        window: Good steps until the scale doubles. None: the scale stays.
    """

    def __init__(self, scale: float = 1.0, window: int | None = None) -> None:
        assert math.frexp(scale)[0] == 0.5, "a power of two"
        self.scale, self._window = scale, window
        self._good = 0

    @property
    def dynamic(self) -> bool:
        return self._window is not None

    @property
    def skips(self) -> bool:
        """Whether a step with bad gradients is skipped, because a lower scale may do."""
        return self.dynamic and self.scale > 1

    def observe(self, finite: bool) -> None:
        """Adapts the scale after each step. `finite` is False only if the scaler `skips`."""
        if self._window is None:
            return
        if not finite:
            assert self.skips
            self.scale, self._good = self.scale / 2, 0
            return
        self._good += 1
        if self._good >= self._window:  # a resumed run's window may be shorter
            self.scale, self._good = min(2 * self.scale, _LARGEST), 0

    def state(self) -> dict[str, float]:
        return {"scale": self.scale, "good": self._good}

    def load(self, state: dict[str, float]) -> None:
        """Loads a checkpoint's state. A scale that stays is the config's."""
        if self.dynamic:
            self.scale, self._good = float(state["scale"]), int(state["good"])


def make_scaler(
    dtype: torch.dtype, loss_scale: float | str | None = None, window: int = WINDOW
) -> LossScaler:
    if loss_scale == "dynamic" or (loss_scale is None and dtype == torch.float16):
        return LossScaler(INITIAL, window)
    return LossScaler(1.0 if loss_scale is None else float(loss_scale))
