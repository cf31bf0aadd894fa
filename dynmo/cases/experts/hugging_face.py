"""The experts of a model of transformers, one weight each, so that they can be placed and moved.

transformers has the experts of a block as two parameters of three dimensions. Here they are two
grouped linears. The model's own code routes, and combines what it adds beside the experts. A folder
that is exported has them as transformers has them.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dynmo.cases.experts.layers import SpreadExperts, counts_of
from dynmo.extend import ConfigError, GroupedLinear, hugging_face

_NAMES = ("gate_up_proj", "down_proj")


class Load:
    """What a case must know of the router of a block.

    Attributes:
        weight: [experts, hidden]. Only its length counts.
        load: Tokens of each expert since it was set to 0, int64 [experts].
    """

    def __init__(self, experts: int) -> None:
        self.weight = torch.empty(experts, 0)
        self.load: Tensor | int = 0


class PlacedExperts(SpreadExperts):
    """Stands for the experts of a block.

    Args:
        original: The experts as transformers has them, on the meta device.
        load: Counts the tokens of each expert.
        choices: Experts that compute a token.
    """

    def __init__(self, original: Any, load: Load, choices: int) -> None:
        super().__init__()
        self._original, self._load = hugging_face.Unowned(original), load
        with torch.device("meta"):
            for name in _NAMES:
                weight: nn.Parameter = getattr(original, name)
                groups, outputs, inputs = weight.shape
                linear = GroupedLinear(groups, inputs, outputs, 0.0)
                linear.per_token = choices
                self.add_module(name, linear.requires_grad_(weight.requires_grad))

    @property
    def gate_up(self) -> GroupedLinear:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.get_submodule("gate_up_proj")  # pyright: ignore[reportReturnType]

    @property
    def down(self) -> GroupedLinear:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.get_submodule("down_proj")  # pyright: ignore[reportReturnType]

    def gated(self, x: Tensor) -> Tensor:
        return self._original.value._apply_gate(x)

    def forward(self, hidden: Tensor, *routed: Tensor, **named: Tensor) -> Tensor:
        """Takes hidden states [tokens, hidden], and experts and weights [tokens, choices]."""
        chosen, weights = (*routed, *named.values())
        with torch.no_grad():
            load = torch.zeros(self.groups, dtype=torch.int64, device=chosen.device)
            load.scatter_add_(0, chosen.flatten(), torch.ones_like(chosen).flatten())
        if self.training:
            self._load.load = self._load.load + load
        order = chosen.flatten().argsort(stable=True)
        out = self.by_pairs(hidden, weights, counts_of(load, len(order)), order)
        return out.to(hidden.dtype)

    def stacked(self) -> nn.Module:
        """Returns experts as transformers has them, with memory of their own."""
        twin = copy.deepcopy(self._original.value)
        for name in _NAMES:
            like, first = getattr(twin, name), next(self.get_submodule(name).parameters())
            empty = torch.empty_like(like, device=first.device)
            setattr(twin, name, nn.Parameter(empty, like.requires_grad))
        return twin

    @torch.no_grad()
    def take(self, stacked: nn.Module) -> None:
        """Takes the values of experts as transformers has them."""
        for name in _NAMES:
            weights = self.get_submodule(name).parameters()
            for mine, given in zip(weights, getattr(stacked, name), strict=True):
                mine.copy_(given)


class ExpertsBlock(hugging_face.BlockLayer):
    """A block, or a half of one, that has experts.

    Args:
        path: Path of the experts in the block.
    """

    varying_time = True

    def __init__(
        self, shared_model: hugging_face.SharedModel, index: int, block: nn.Module, path: str
    ) -> None:
        original: Any = block.get_submodule(path)
        _check(original)
        load = Load(len(original.gate_up_proj))
        text = shared_model.structure.model.config.get_text_config()
        choices: int = getattr(text, "num_experts_per_tok", 1)
        placed = PlacedExperts(original, load, choices)
        super().__init__(shared_model, index, hugging_face.with_module(block, path, placed))
        self.router = load
        self._path = f"{shared_model.structure.block_path(index)}.{path}"
        self._stacked: hugging_face.Unowned[nn.Module] | None = None

    @property
    def _experts(self) -> PlacedExperts:
        return self.get_submodule(self._path)  # pyright: ignore[reportReturnType]

    @property
    def of_folder(self) -> nn.Module:
        own = nn.Module()
        for name, each in self.named_children():
            own.add_module(name, each)
        return hugging_face.with_module(own, self._path, self._experts.stacked())

    def take(self, of_folder: nn.Module) -> None:
        self._experts.take(of_folder.get_submodule(self._path))


def _check(original: Any) -> None:
    unlike = {
        "no gate": not original.has_gate,
        "biases": original.has_bias,
        "turned weights": original.is_transposed,
        "a norm behind them": original.has_post_expert_norm,
        "adapters": any(name not in _NAMES for name, _ in original.named_parameters()),
    }
    what = ", ".join(name for name, is_so in unlike.items() if is_so)
    if what:
        raise ConfigError(
            f"dynamism.cases: the experts of {type(original).__name__} have {what}, which "
            '"experts" does not place; leave the case out'
        )


def experts_in(block: nn.Module) -> str | None:
    """Returns the path of the experts of a block. None if it has none."""
    return next(
        (
            path
            for path, each in block.named_modules()
            if hasattr(each, "has_gate")
            and isinstance(getattr(each, "gate_up_proj", None), nn.Parameter)
        ),
        None,
    )


def layers_of(kinds: hugging_face.LayerKinds) -> hugging_face.LayerKinds:
    """Returns what makes the layers of a model of transformers whose experts can be placed."""
    make = kinds.block

    def block(
        shared_model: hugging_face.SharedModel, spec: hugging_face.LayerSpec, own: nn.Module
    ) -> hugging_face.BlockLayer:
        path = experts_in(own)
        if path is None:
            return make(shared_model, spec, own)
        return ExpertsBlock(shared_model, spec.block or 0, own, path)

    return replace(kinds, block=block)
