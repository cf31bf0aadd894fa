"""Compares dynmo's layers with the model of transformers that they are parts of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dynmo.errors import ConfigError
from dynmo.models.huggingface.build import Builder, layer_specs
from dynmo.models.huggingface.halves import BlockHalves, halves_of
from dynmo.models.huggingface.model import meta_model
from dynmo.models.huggingface.private import initialise
from dynmo.models.huggingface.probe import ModelStructure, structure_of
from dynmo.models.tied import Pair
from tests.models.huggingface.tiny import VOCABULARY, config

# A tensor that is taken apart along its rows by mistake has three parts, not two.
ROWS, TOKENS = 3, 7

BATCHES = ("plain", "padded", "packed")

Outcome = Literal["bits", "other numbers", "refused", "not built"]


@dataclass
class Family:
    name: str
    kind: str  # the first model type of the class
    outcome: Outcome = "bits"  # of logits and gradients, in each batch
    blocks: tuple[int, int] = (0, 0)  # how many are cut into halves, of how many
    reason: str = ""  # why the model is refused, or its blocks are whole
    # By the kind of the blocks and of the batch.
    differences: dict[tuple[str, str], str] = field(default_factory=dict)


def kinds() -> dict[str, str]:
    """Returns a model type of each class that generates text: the class's own, else the first."""
    chosen: dict[str, str] = {}
    for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if str(name) not in chosen or str(name).lower().startswith(kind):
            chosen[str(name)] = kind
    return chosen


def family(name: str) -> Family:
    """Compares one class with its layers, with whole blocks and with halves."""
    kind = kinds()[name]
    told = Family(name, kind)
    try:
        made = config(kind)
        meta = meta_model(kind, made, trust_remote_code=False)
    except Exception as error:  # transformers has several kinds
        told.outcome, told.reason = "not built", " ".join(str(error).split())
        return told
    try:
        structure = structure_of(meta)
        cuts = [halves_of(structure, index) for index in range(structure.count)]
        told.blocks = (sum(isinstance(each, BlockHalves) for each in cuts), structure.count)
        told.reason = "; ".join(dict.fromkeys(each for each in cuts if isinstance(each, str)))
        assert meta.num_parameters() < 1e7, f"{kind}: make its config smaller"
        whole = whole_model(made)
        halves = [each if isinstance(each, BlockHalves) else None for each in cuts]
        for what, cut in {"whole": [None] * structure.count, "halves": halves}.items():
            if what == "whole" or any(cut):
                for batch, different in _differences(structure, cut, whole).items():
                    told.differences[what, batch] = different
    except ConfigError as error:
        told.outcome, told.reason = "refused", str(error)
    if told.differences:
        told.outcome = "other numbers"
    return told


def batches() -> dict[str, dict[str, Tensor]]:
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


def whole_model(made: PreTrainedConfig) -> PreTrainedModel:
    """Returns the model of transformers. It trains, without dropout."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(made).train()


def _differences(
    structure: ModelStructure, halves: list[BlockHalves | None], whole: nn.Module
) -> dict[str, str]:
    """What differs, by the batch."""
    values, buffers = whole.state_dict(), dict(whole.named_buffers())

    def fill(_: int, layer: nn.Module) -> None:
        initialise(structure.model, layer)
        for name, tensor in layer.state_dict().items():
            tensor.copy_(values[name])

    builder = Builder(structure, layer_specs(halves), fill)
    layers = [layer.train() for layer in builder.build(range(len(builder.specs)))]
    for layer in layers:  # their buffers may be in no file
        assert all(torch.equal(buffer, buffers[name]) for name, buffer in layer.named_buffers())
    tied = builder.tied()
    found = {name: difference(layers, tied, whole, batch) for name, batch in batches().items()}
    return {name: different for name, different in found.items() if different}


def difference(
    layers: list[nn.Module], tied: tuple[Pair, ...], whole: nn.Module, batch: dict[str, Tensor]
) -> str:
    """Runs one forward and backward of both. Returns what differs, or nothing."""
    whole.zero_grad()
    expected: Tensor = whole(**batch, use_cache=False).logits
    found: Any = layers[0](**batch)
    for layer in layers[1:]:
        layer.zero_grad()
        found = layer(*found)
    layers[0].zero_grad()
    gradient = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    expected.backward(gradient)
    found.backward(gradient)
    if not torch.equal(expected, found):
        return f"logits by {float((expected - found).abs().max()):.1e}"
    gradients = {name: p.grad for layer in layers for name, p in layer.named_parameters()}
    for (_, owner), (_, user) in tied:
        used, owned = gradients.pop(user), gradients[owner]
        gradients[owner] = owned if used is None else used if owned is None else used + owned
    wanted = dict(whole.named_parameters(remove_duplicate=False))
    unlike = [name for name, each in gradients.items() if not _equal(each, wanted[name].grad)]
    return f"gradients of {', '.join(unlike)}" if unlike else ""


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    """A weight without effect may have no gradient, or a gradient of zeros."""
    if one is None or other is None:
        return all(each is None or not each.any() for each in (one, other))
    return torch.equal(one, other)
