"""One update over all layers of a rank by torch's optimizers, which can be taken back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from dynmo.kernels.torch_private import scale_all
from dynmo.runtime.optim.fused import Fused
from dynmo.runtime.optim.optimizer import LayerOptimizer, ParameterShare, shares_in
from dynmo.runtime.optim.parameter_groups import Group, Rates
from dynmo.runtime.optim.trial import Make, make_optimizer

# A group, and whether its parameters are spared from weight decay.
_Part = tuple[Group, bool]


class Update:
    """One torch optimizer for each function in the groups, over the shares of all layers.

    Each share keeps its state. The optimizers have it during a step alone.
    """

    def __init__(self) -> None:
        # Pieces that have had a gradient.
        self._known: dict[ParameterShare, None] = {}
        self._made: dict[Make, tuple[list[_Part], torch.optim.Optimizer]] = {}

    def release(self) -> None:
        """Drops the optimizers, since a layer goes, whose memory they would keep."""
        self._known, self._made = {}, {}

    def step(self, layers: Mapping[LayerOptimizer, float], rates: Rates) -> None:
        """Applies the gradients of each layer times its factor. They stay, multiplied."""
        gradients = _gradients(layers)
        for layer, factor in layers.items():
            grads = [gradients[share] for share in layer.shares.values() if share in gradients]
            if grads and factor != 1.0:
                scale_all(grads, factor)
        for share in gradients:
            share.is_fresh = not share.state
        self._run(gradients, rates, lambda optimizer: optimizer.step())

    def restore(self, layers: Iterable[LayerOptimizer]) -> None:
        """Takes back the step since the shares' `keep`: the same bits as before it."""
        for share in shares_in(layers):
            share.restore()
        # An optimizer may have made the state of its first step when it was made itself.
        self.release()

    def invert(self, layers: Iterable[LayerOptimizer], rates: Rates) -> None:
        """Takes back the last step by arithmetic (Zero Bubble, in-place rollback).

        It needs no copies, and does not give the same bits. The gradients must still be there. Only
        dynmo's own optimizers can.
        """
        gradients = _gradients(layers)
        self._run(gradients, rates, lambda optimizer: cast(Fused, optimizer).invert())
        for share in gradients:
            if share.is_fresh:
                share.state = {}

    def _run(
        self,
        gradients: Mapping[ParameterShare, Tensor],
        rates: Rates,
        act: Callable[[torch.optim.Optimizer], object],
    ) -> None:
        """Calls `act` with each optimizer, which has options, gradients and state meanwhile."""
        if not gradients:
            return
        self._make(gradients)
        for parts, optimizer in self._made.values():
            for (group, is_spared), options in zip(parts, optimizer.param_groups, strict=True):
                new = rates[group.number] if isinstance(rates, Sequence) else {"lr": rates}
                options.update({**new, "weight_decay": 0.0} if is_spared else new)
        for share, gradient in gradients.items():
            share.made().grad = gradient
            if share.state:
                self._made[share.group.make][1].state[share.made()] = share.state
        for _, optimizer in self._made.values():
            act(optimizer)
        for share in gradients:
            share.state = self._made[share.group.make][1].state.pop(share.made(), {})
            if share.made() is not share.parameter:
                share.made().grad = None
            share.publish()

    def _make(self, shares: Iterable[ParameterShare]) -> None:
        """Makes the optimizers anew if a share has its first gradient."""
        known = self._known | dict.fromkeys(shares)
        if len(known) == len(self._known):
            return
        self._known = known
        made: dict[Make, dict[_Part, list[Tensor]]] = {}
        for share in known:
            part = share.group, share.group.spares(share.parameter.dim())
            made.setdefault(share.group.make, {}).setdefault(part, []).append(share.made())
        self._made = {
            make: (
                list(parts),
                make_optimizer(make, [(group.given, own) for (group, _), own in parts.items()]),
            )
            for make, parts in made.items()
        }


def _gradients(layers: Iterable[LayerOptimizer]) -> dict[ParameterShare, Tensor]:
    pairs = ((share, share.gradient()) for share in shares_in(layers))
    return {share: gradient for share, gradient in pairs if gradient is not None}
