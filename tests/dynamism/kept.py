"""Layers that only remember what was done to them.

They are for cases that need no modules.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor, nn

from dynmo.balance.expert_placement import ExpertPlacement
from dynmo.dynamism.pruning import Alone


class Kept:
    """All `modules` are here, if they are given.

    Otherwise each layer has something to train, elsewhere.
    """

    def __init__(
        self, count: int, names: Sequence[str] = (), modules: Sequence[nn.Module] = ()
    ) -> None:
        self.count, self.modules = count, modules or [nn.Linear(1, 1) for _ in range(count)]
        self.names = names or [f"layer{i}" for i in range(count)]
        self.own: Sequence[int] = range(len(modules))
        self.frozen: frozenset[int] = frozenset()
        self.collective = Alone()
        self.expert_place = 0
        self.expert_placements: dict[int, ExpertPlacement] = {}
        self.tensors: dict[int, dict[str, Tensor]] = {i: {} for i in range(count)}

    def freeze(self, layers: Collection[int]) -> None:
        self.frozen |= frozenset(layers)

    def unfreeze(self, layers: Collection[int]) -> None:
        self.frozen -= frozenset(layers)

    def kept(self, layer: int) -> dict[str, Tensor]:
        return self.tensors[layer]

    def moments(self, layer: int) -> dict[str, Tensor]:
        return {}

    def rebuild(self, layer: int, moments: Mapping[str, Tensor]) -> None:
        pass

    def place_experts(self, placements: Mapping[int, ExpertPlacement]) -> int:
        self.expert_placements |= placements
        return 0
