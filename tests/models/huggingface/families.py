"""Compares dynmo's layers with the model of transformers that they are parts of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from dynmo.models.huggingface.model import HuggingFaceModel, from_pretrained
from tests.models.huggingface.tiny import VOCABULARY

# A tensor that is taken apart along its rows by mistake has three parts, not two.
ROWS, TOKENS = 3, 7


def batches() -> dict[str, dict[str, Tensor]]:
    """Returns a batch without padding, one with padding on either side, and a packed one."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (ROWS, TOKENS), generator=generator)
    mask = torch.ones(ROWS, TOKENS, dtype=torch.int64)
    mask[0, :2] = 0
    mask[1, 5:] = 0
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]] * ROWS)
    return {
        "plain": {"input_ids": ids},
        "padded": {"input_ids": ids, "attention_mask": mask},
        "packed": {"input_ids": ids, "position_ids": positions},
    }


def whole_model(config: PreTrainedConfig, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).eval()


def layers_of(model: HuggingFaceModel, whole: nn.Module) -> list[nn.Module]:
    """Returns the layers with the weights of a whole model. Other buffers are their own."""
    layers = model.build(range(model.layers))
    values = whole.state_dict()
    for layer in layers:
        layer.eval()
        for name, tensor in layer.state_dict().items():
            tensor.copy_(values[name])
    return layers


@dataclass
class Difference:
    """What differs between dynmo and transformers. Empty means nothing."""

    logits: float
    gradients: dict[str, float]

    def __bool__(self) -> bool:
        return self.logits != 0 or bool(self.gradients)


def difference(
    layers: list[nn.Module], model: HuggingFaceModel, whole: nn.Module, batch: dict[str, Tensor]
) -> Difference:
    """Runs one forward and backward of both."""
    whole.zero_grad()
    expected: Tensor = whole(**batch, use_cache=False).logits
    for layer in layers:
        layer.zero_grad()
    hidden: Any = layers[0](**batch)
    for layer in layers[1:]:
        hidden = layer(*hidden)
    gradient = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    expected.backward(gradient)
    hidden.backward(gradient)
    found = {name: p.grad for layer in layers for name, p in layer.named_parameters()}
    for (_, owner), (_, user) in model.tied:
        if found[user] is not None:
            found[owner] = found[user] if found[owner] is None else found[owner] + found[user]
    users = {user for _, (_, user) in model.tied}
    wanted = {
        name: parameter.grad
        for name, parameter in whole.named_parameters(remove_duplicate=False)
        if name not in users
    }
    gradients = {
        name: _distance(wanted[name], found.get(name))
        for name in wanted
        if not _equal(wanted[name], found.get(name))
    }
    equal = torch.equal(expected, hidden)
    return Difference(0 if equal else _distance(expected, hidden), gradients)


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return (one is None or not one.any()) and (other is None or not other.any())
    return torch.equal(one, other)


def _distance(one: Tensor | None, other: Tensor | None) -> float:
    if one is None or other is None or one.shape != other.shape:
        return float("inf")
    return float((one - other).abs().max())
