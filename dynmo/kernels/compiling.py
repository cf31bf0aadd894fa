"""torch.compile of a layer, between the modules that split its backward.

A split linear's backward leaves work on a tape, which a compiler would trace away. These modules
therefore stay as they are. The parts between them (norms, rotary positions, gates) are compiled,
forward and backward. B becomes faster, and W stays the same.

    compiled | linear | compiled | linear | compiled            (one half of a block)

Compiled arithmetic rounds differently from eager arithmetic, but the same on every rank. A run has
one digest, which is not the eager run's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dynmo.errors import ConfigError
from dynmo.kernels.deferral import CaughtProducts
from dynmo.kernels.split import splits
from dynmo.kernels.torch_private import configure_compiler, has_cpp_compiler, has_triton

# A layer's code is compiled anew for each dtype, for training and evaluation, and with parts of it
# frozen: a dozen or two variants.
_MOST = 64


def compiled(module: nn.Module) -> Callable[..., Any]:
    """Return the function to call in the module's place."""
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    _check(device)
    for child in module.modules():
        if splits(child) and not isinstance(child, CaughtProducts):
            _leave_out(type(child), "forward")
    # Kernels that the module calls.
    for kind in getattr(module, "uncompiled_classes", ()):
        _leave_out(kind, "__call__")
    # torch itself causes these warnings. One comes as its compiler is imported, the other when the
    # compiler inspects the output of a linear between two parts.
    for message in (
        "`torch.jit.script_method` is deprecated",
        "The .grad attribute of a Tensor that is not a leaf",
    ):
        warnings.filterwarnings("ignore", message)
    configure_compiler(device, _MOST)
    return torch.compile(module, dynamic=False)


def _leave_out(kind: type, name: str) -> None:
    """Make the compiler step around a method. Nothing changes without a compiler."""
    owner = next(base for base in kind.__mro__ if name in vars(base))
    method = vars(owner)[name]
    if not getattr(method, "_torchdynamo_disable", False):
        setattr(owner, name, torch.compiler.disable(method))


def _check(device: torch.device) -> None:
    if device.type == "cuda":
        is_there, needs = has_triton(), "Triton on CUDA; install it"
    else:
        is_there, needs = has_cpp_compiler(), "a C++ compiler on CPU (g++ or clang++); install one"
    if not is_there:
        raise ConfigError(f"train.compile = true needs {needs}, or set train.compile = false")
