"""The layers that train, the same on every rank.

Frozen layers keep weights and optimizer state until they thaw.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn

from dynmo.errors import RunError
from dynmo.models.tied import Pair
from dynmo.runtime.comm.rank_group import RankGroup


class Frozen:
    def __init__(self, modules: Sequence[nn.Module], tied: Sequence[Pair]) -> None:
        self._modules, self._tied = modules, tied
        # Parameters of each frozen layer that trained before, so that it can thaw.
        self._thawed: dict[int, list[str]] = {}
        self._freeze_tied()

    @property
    def layers(self) -> frozenset[int]:
        return frozenset(self._thawed)

    @property
    def first_trainable(self) -> int:
        """The global index of the first layer with something to train."""
        for index, module in enumerate(self._modules):
            if _trains(module):
                return index
        raise RunError("no layer has anything to train; leave at least the last one unfrozen")

    def first_trainable_after(self, layers: Collection[int]) -> int | None:
        """Returns the first trainable layer once these layers are frozen too, or None."""
        gone = set(layers) | self.layers
        return next(
            (i for i, m in enumerate(self._modules) if i not in gone and _trains(m)),
            None,
        )

    def freeze(self, layers: Collection[int]) -> None:
        for index in sorted(layers):
            if index not in self._thawed:
                names = [
                    name for name, p in self._modules[index].named_parameters() if p.requires_grad
                ]
                self._thawed[index] = names
                for name in names:
                    parameter = self._modules[index].get_parameter(name)
                    parameter.requires_grad_(False)
                    parameter.grad = None
        self._freeze_tied()

    def thaw(self, layers: Collection[int]) -> None:
        for index in sorted(layers):
            for name in self._thawed.pop(index, ()):
                self._modules[index].get_parameter(name).requires_grad_(True)
        self._freeze_tied()

    def share(self, world: RankGroup, own_layers: Collection[int]) -> None:
        """Tells all ranks which layers train, if a loop has changed `requires_grad` by itself."""
        table = torch.zeros(len(self._modules), dtype=torch.int64)
        for index in own_layers:
            table[index] = 1 + _trains(self._modules[index])
        world.everyone.largest(table, "which layers train")
        for index, flag in enumerate(table.tolist()):
            module = self._modules[index]
            if index not in own_layers and _trains(module) != (flag == 2):
                for parameter in module.parameters():
                    parameter.requires_grad_(flag == 2 and parameter.is_floating_point())

    def _freeze_tied(self) -> None:
        """Freezes a tied weight with its owner, in every use, because it is one weight."""
        for (owner, owner_name), (user, name) in self._tied:
            trains = self._modules[owner].get_parameter(owner_name).requires_grad
            self._modules[user].get_parameter(name).requires_grad_(trains)


def _trains(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())
