"""torch's fused AdamW and SGD, and their inverse.

They have the bits of `torch.optim.AdamW` and `SGD` with `fused=True`, whose functional forms they
call. torch's classes import its compiler, which takes a second on each rank.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

Named = dict[str, Any]
"""Options of a group of parameters, or state of a parameter."""


class Fused(torch.optim.Optimizer):
    """An optimizer whose last step can be taken back by arithmetic.

    Attributes:
        options: The options of a group, and their defaults.
        moments: Names of the state that is of a parameter's size.
    """

    options: ClassVar[dict[str, Any]]
    moments: ClassVar[tuple[str, ...]]

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, self.options | options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.param_groups.append(self.defaults | param_group)

    def step(self, closure: object = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        with torch.no_grad():
            for group in self.param_groups:
                trained = [p for p in group["params"] if p.grad is not None]
                # torch starts the momentum of all parameters that it is given, or of none.
                fresh = [p for p in trained if p not in self.state]
                for alike in (fresh, [p for p in trained if p in self.state]):
                    if alike:
                        self._update(alike, [p.grad for p in alike], group)

    def invert(self) -> None:
        """Takes back the last step. The gradients must still be there.

        It does not give the same bits.
        """
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        self._invert(p, p.grad, self.state.get(p, {}), group)

    def _update(self, params: list[Tensor], grads: list[Tensor], group: Named) -> None: ...

    def _invert(self, p: Tensor, g: Tensor, state: Named, group: Named) -> None: ...


class AdamW(Fused):
    options: ClassVar = {"lr": 0.0, "weight_decay": 0.0, "betas": (0.9, 0.999), "eps": 1e-8}
    moments = ("exp_avg", "exp_avg_sq")

    def _update(self, params: list[Tensor], grads: list[Tensor], group: Named) -> None:
        for p in params:
            if p not in self.state:
                moments = {key: torch.zeros_like(p, requires_grad=False) for key in self.moments}
                self.state[p] = {"step": torch.zeros((), device=p.device)} | moments
        b1, b2 = group["betas"]
        adamw(
            params,
            grads,
            [self.state[p]["exp_avg"] for p in params],
            [self.state[p]["exp_avg_sq"] for p in params],
            [],
            [self.state[p]["step"] for p in params],
            fused=True,
            amsgrad=False,
            beta1=b1,
            beta2=b2,
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _invert(self, p: Tensor, g: Tensor, state: Named, group: Named) -> None:
        """A moment whose b is 0 has no past, and becomes 0 but for rounding.

        u = lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
        p = (p + u) / (1 - lr wd)
        v = (v - (1 - b2) g^2) / b2;  m = (m - (1 - b1) g) / b1;  t = t - 1
        """
        first, second, t = state["exp_avg"], state["exp_avg_sq"], float(state["step"])
        (b1, b2), lr = group["betas"], float(group["lr"])
        root = (second / (1 - b2**t)).sqrt_().add_(group["eps"])
        p.addcdiv_(first, root, value=lr / (1 - b1**t)).div_(1 - lr * group["weight_decay"])
        # Rounding may leave a negative square.
        second.addcmul_(g, g, value=b2 - 1).div_(b2 or 1.0).clamp_(min=0)
        first.sub_(g, alpha=1 - b1).div_(b1 or 1.0)
        state["step"].sub_(1)


class SGD(Fused):
    options: ClassVar = {"lr": 0.0, "weight_decay": 0.0, "momentum": 0.0}
    moments = ("momentum_buffer",)

    def _update(self, params: list[Tensor], grads: list[Tensor], group: Named) -> None:
        if not group["momentum"]:  # drops the buffers of an earlier run
            for p in params:
                self.state.pop(p, None)
        buffers = [self.state.get(p, {}).get("momentum_buffer") for p in params]
        sgd(
            params,
            grads,
            buffers,
            fused=True,
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
        for p, buffer in zip(params, buffers, strict=True):
            if buffer is not None:
                self.state[p] = {"momentum_buffer": buffer}

    def _invert(self, p: Tensor, g: Tensor, state: Named, group: Named) -> None:
        """p = p + lr b;  b = (b - g - wd p) / momentum"""
        lr, decay, buffer = float(group["lr"]), group["weight_decay"], state.get("momentum_buffer")
        if buffer is None:  # no momentum: the step was lr * (g + wd p)
            p.add_(g, alpha=lr).div_(1 - lr * decay)
            return
        p.add_(buffer, alpha=lr)
        buffer.sub_(g).sub_(p, alpha=decay).div_(group["momentum"])
