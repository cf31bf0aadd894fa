"""Small modules, layers of them, and their tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dynmo.runtime.comm.clock import HostClock
from dynmo.runtime.layer.layer import Layer


class Net(nn.Module):
    """Modules or parameters by name, and what a forward does with them."""

    def __init__(self, do: Callable[..., Any], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.do = do
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Tensor) -> Any:
        return self.do(self, *inputs)


def layer_of(module: nn.Module, index: int = 3) -> Layer:
    return Layer(index, module, HostClock(), seed=0)


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gradients_of(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in module.named_parameters()}


def assert_same(ours: Mapping[Any, Tensor | None], theirs: Mapping[Any, Tensor | None]) -> None:
    """The same names and bits. No tensor is another thing than zeros."""
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        other = theirs[name]
        if tensor is None or other is None:
            assert tensor is other, name
        else:
            assert torch.equal(tensor, other), name


def bits_of(tensor: Tensor) -> str:
    return hashlib.sha256(
        tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    ).hexdigest()
