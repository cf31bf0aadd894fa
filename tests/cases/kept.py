"""Layers that only remember what was done to them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dynmo.config import Config
from dynmo.pipeline.case import Dynamism
from dynmo.pipeline.cases import make_cases
from dynmo.train.setup import own_cases


class Alone:
    """The collective of a rank that asks no other."""

    def sum(self, tensor: Tensor, what: str) -> Tensor:
        return tensor

    def sum_all(self, tensor: Tensor, what: str) -> Tensor:
        return tensor


class Kept:
    """All `modules` are here. Without them, each layer has something to train, elsewhere."""

    def __init__(
        self, count: int = 0, names: Sequence[str] = (), modules: Sequence[nn.Module] = ()
    ) -> None:
        self.modules = modules or [nn.Linear(1, 1) for _ in range(count)]
        self.count = count = len(self.modules)
        self.names = names or [f"layer{i}" for i in range(count)]
        self.own: Sequence[int] = range(len(modules))
        self.frozen: frozenset[int] = frozenset()
        self.collective = Alone()
        self.spread = None
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


def short_run(case: str, options: dict[str, Any], ranks: int, blocks: int) -> dict[str, Any]:
    return {
        "seed": 7,
        "model": {"blocks": blocks, "hidden": 16, "heads": 2, "sequence": 8},
        "train": {"steps": 9, "global_batch": 4, "micro_batch": 2, "lr": 1e-2},
        "parallel": {"pipeline": ranks},
        "balance": {"balancer": "none"},
        "dynamism": {"cases": [case], case: options},
        "trace": {"steps": 0},
    }


def cases_of(config: Config, layers: int) -> list[Dynamism]:
    """Makes the cases that a config names."""
    on_cuda = config.parallel.device != "cpu" and torch.cuda.is_available()
    cases = [*config.dynamism.named.values(), *own_cases(config)]
    return make_cases(cases, config.facts(layers, on_cuda))
