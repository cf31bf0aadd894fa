"""AdamW with a parameter group per layer, and a gradient norm that does not depend on the placement.

Each layer has its own optimizer object, so its state travels with it, and a frozen layer is simply not stepped: no decay, no moments.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# A squared norm is summed over blocks of this many elements, then over blocks in order: the same bits however a weight is sharded.
NORM_BLOCK = 1 << 16


@dataclass(frozen=True)
class AdamWSettings:
    """Decoupled weight decay acts on matrices only (parameters of two or more dimensions)."""

    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8


def decays(parameter: Tensor) -> bool:
    return parameter.dim() >= 2


class LayerOptimizer:
    """AdamW over one layer. `shared` names parameters that another layer owns and updates (tied weights)."""

    def __init__(self, module: nn.Module, settings: AdamWSettings, shared: frozenset[str] = frozenset()) -> None:
        self._named = {name: p for name, p in module.named_parameters() if name not in shared}
        groups = [
            {"params": [p for p in self._named.values() if decays(p)], "weight_decay": settings.weight_decay},
            {"params": [p for p in self._named.values() if not decays(p)], "weight_decay": 0.0},
        ]
        groups = [g for g in groups if g["params"]]
        # lr is set at each step; fused runs the same arithmetic in one pass over the weights.
        self._adamw = torch.optim.AdamW(groups, lr=0.0, betas=settings.betas, eps=settings.eps, fused=True) if groups else None

    def step(self, lr: float, scale: float) -> None:
        """Applies the gradients times `scale` (the clip factor), and drops them."""
        if self._adamw is None:
            return
        gradients = [p.grad for p in self._named.values() if p.grad is not None]
        if gradients:
            if scale != 1.0:
                torch._foreach_mul_(gradients, scale)
            for group in self._adamw.param_groups:
                group["lr"] = lr
            self._adamw.step()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        for p in self._named.values():
            p.grad = None

    def state(self) -> dict[str, Tensor]:
        """`parameter/moment` -> tensor, for those parameters that have been stepped."""
        if self._adamw is None:
            return {}
        return {
            f"{name}/{key}": value
            for name, p in self._named.items()
            for key, value in self._adamw.state.get(p, {}).items()
            if isinstance(value, Tensor)
        }

    def load(self, state: dict[str, Tensor]) -> None:
        """The inverse of `state`; the optimizer takes the tensors as they are, on the device of their parameters."""
        assert self._adamw is not None or not state
        for key, value in state.items():
            name, _, moment = key.rpartition("/")
            assert self._adamw is not None
            self._adamw.state[self._named[name]][moment] = value.to(self._named[name].device)

    @property
    def state_bytes(self) -> int:
        """What AdamW keeps for the parameters that train: two moments each (and whatever frozen ones left)."""
        held = sum(t.nbytes for t in self.state().values())
        coming = sum(2 * p.nbytes for p in self._named.values() if p.requires_grad and p not in (self._adamw.state if self._adamw else {}))
        return held + coming


def squared_norm(gradients: Iterable[Tensor | None]) -> float:
    """Sum of squares in float64 over fixed blocks, in the order given."""
    total = 0.0
    for gradient in gradients:
        if gradient is not None:
            for block in _blocks(gradient):
                total += block
    return total


def _blocks(gradient: Tensor) -> list[float]:
    """Each block's sum. They are added one by one: a tensor's own sum would be rounded in an order that depends on how many there are."""
    flat = gradient.detach().reshape(-1).float()
    whole = flat.numel() // NORM_BLOCK * NORM_BLOCK
    sums = [flat[:whole].view(-1, NORM_BLOCK).square().sum(1)] if whole else []
    if whole < flat.numel():
        sums.append(flat[whole:].square().sum().reshape(1))
    return torch.cat(sums).tolist() if sums else []


def clip_factor(norm: float, limit: float) -> float:
    """What gradients are multiplied with so that their norm is at most `limit` (0: no clipping)."""
    return limit / (norm + 1e-6) if limit and norm > limit else 1.0
