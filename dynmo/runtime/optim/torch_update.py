"""A user's torch optimizers over the parameters of one layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from dynmo.runtime.optim.own_update import State
from dynmo.runtime.optim.parameter_groups import LayerGroups, Rates
from dynmo.runtime.optim.state_form import NUMBER, Make
from dynmo.runtime.optim.trial import make_optimizer


class TorchUpdate:
    """One torch optimizer for each function in the layer's groups.

    They are made when a parameter has its first gradient.
    """

    def __init__(self, groups: LayerGroups) -> None:
        self._groups = groups
        self._pieces: dict[str, Tensor] = {}
        # For each function, the numbers of its groups here.
        self._made: dict[Make, tuple[list[int], torch.optim.Optimizer]] = {}

    def moments(self, name: str, dims: int) -> tuple[str, ...]:
        forms = self._groups.group(name).forms(dims).items()
        return tuple(f"{key}{NUMBER}" if form.is_number else key for key, form in forms)

    def is_cut(self, name: str, moment: str, dims: int) -> bool:
        form = self._groups.group(name).forms(dims).get(moment)
        return form is not None and form.is_cut

    def on_cpu(self, name: str, moment: str, dims: int) -> bool:
        form = self._groups.group(name).forms(dims).get(moment)
        return form is not None and form.on_cpu

    def state_bytes(self, name: str, shape: Sequence[int], element: int) -> int:
        return self._groups.group(name).state_bytes(shape, element)

    def step(
        self,
        pieces: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        state: State,
        rates: Rates,
    ) -> None:
        self._make(pieces)
        for name, piece in pieces.items():
            piece.grad = gradients[name]
            if name in state:
                self._optimizer(name).state[piece] = state[name]
        for numbers, optimizer in self._made.values():
            for number, group in zip(numbers, optimizer.param_groups, strict=True):
                group.update(rates[number] if isinstance(rates, Sequence) else {"lr": rates})
            optimizer.step()
        for name, piece in pieces.items():
            state[name] = self._optimizer(name).state[piece]
            if not isinstance(piece, nn.Parameter):
                piece.grad = None

    def _optimizer(self, name: str) -> torch.optim.Optimizer:
        make = self._groups.group(name).make
        assert make is not None
        return self._made[make][1]

    def _make(self, pieces: Mapping[str, Tensor]) -> None:
        """Makes the optimizers anew if a parameter has its first gradient."""
        if pieces.keys() <= self._pieces.keys():
            return
        self._pieces |= pieces
        by_make: dict[Make, dict[int, list[Tensor]]] = {}
        for name, piece in self._pieces.items():
            make, number = self._groups.group(name).make, self._groups.of.get(name, 0)
            assert make is not None
            by_make.setdefault(make, {}).setdefault(number, []).append(piece)
        groups = self._groups.groups
        self._made = {
            make: (
                list(own),
                make_optimizer(make, [(groups[i].given, tensors) for i, tensors in own.items()]),
            )
            for make, own in by_make.items()
        }

    def forget(self) -> None:
        """Drops the optimizers, whose parameters have state that was taken back."""
        self._pieces, self._made = {}, {}
