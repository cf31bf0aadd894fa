"""Packed rows: what a batch of them may be, and whether a model keeps their samples apart.

A packed row holds several samples. Its position ids start again with each sample. transformers
separates the samples only if the batch has no mask. It reads every nonzero number of a mask as 1,
so a mask cannot separate them. Code that ignores position ids mixes them: ALiBi, recurrent layers,
convolutions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from dynmo.errors import ConfigError, InputError
from dynmo.models.huggingface.halves import evaluated
from dynmo.models.huggingface.layers import EmbeddingLayer, HuggingFaceLayer
from dynmo.models.huggingface.stubs import hidden_of
from dynmo.models.model import Model
from dynmo.options import LARGEST

# Two packed rows: the position of each token in its sample, and the row of the sample alone. The
# last two tokens are padding.
_POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3], [0, 1, 0, 1, 2, 3, 0, 0]])
_SAMPLES = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1], [2, 2, 3, 3, 3, 3, 4, 5]])
_ALONE = 6, 4
# A choice of experts may hang on a rounding, but hardly so in both draws.
_DRAWS = 2
# Embedded tokens are as small. A block's residual must not hide what it adds.
_SCALE = 0.03
# Of the largest number. In the tiny models of `docs/tools/families.py` that keep samples apart, the
# difference is 2e-7 at most. In the others it is at least 1e-4.
_TOLERANCE = 1e-5


def check_rows(batch: Mapping[str, Tensor], where: str, vocab: int = LARGEST) -> None:
    """Checks ids, mask and position ids of a batch.

    Args:
        batch: Tensors by name.
        where: What the message names.
        vocab: Number of tokens of the model. Ids on a GPU are not looked at.

    Raises:
        InputError: The model has no such id, the mask numbers samples, or the position ids of a
            row start again beside it.
    """
    ids = batch.get("input_ids")
    if ids is not None and ids.numel() and ids.device.type == "cpu":
        wrong = ids[(ids < 0) | (ids >= vocab)]
        if len(wrong):
            raise InputError(
                f"input_ids of {where} has {int(wrong[0])}; the model has tokens 0 to {vocab - 1}"
            )
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    if mask is None or mask.dim() != 2:
        return
    if ((mask != 0) & (mask != 1)).any():
        raise InputError(
            f"attention_mask of {where} has other numbers than 0 and 1, which transformers takes "
            "as 1; if they count the samples of a row, leave out the mask, and give position_ids "
            "that start again with each sample"
        )
    if positions is None or positions.dim() != 2:
        return
    if _restarts(mask == 1, positions.expand(len(mask), -1)).any():
        raise InputError(
            f"position_ids of {where} start again within a row, but transformers keeps its samples "
            "apart only without a mask; leave out the mask (attention_mask)"
        )


def _restarts(is_real: Tensor, positions: Tensor) -> Tensor:
    """Returns which tokens do not come after the token before them, apart from padding."""
    places = torch.arange(positions.shape[1], device=positions.device).expand_as(positions)
    last = torch.where(is_real, places, -1).cummax(1).values[:, :-1]
    before = positions.gather(1, last.clamp(min=0))
    return is_real[:, 1:] & (last >= 0) & (positions[:, 1:] <= before)


def check_packing(model: Model, owned: Collection[int]) -> None:
    """Loads layers, and checks on real values that each keeps the samples of a row apart.

    Each must give the tokens of a sample in a packed row what it gives them in a row of their own.

    Raises:
        ConfigError: A layer mixes the samples of a row.
    """
    layers = model.build(owned)
    for index in sorted(owned):
        _check(layers[index], model.names[index])


def _check(layer: nn.Module, name: str) -> None:
    assert isinstance(layer, HuggingFaceLayer)
    model = layer.shared_model.structure.model
    with evaluated(layer), torch.no_grad(), torch.device("cpu"):
        if not any(_keeps_apart(layer, draw) for draw in range(_DRAWS)):
            raise ConfigError(
                f'data.batching = "packed": {type(model).__name__} does not keep the samples of a '
                f'row apart in its layer {name}; use "grouped"'
            )


def _keeps_apart(layer: HuggingFaceLayer, seed: int) -> bool:
    structure, draws = layer.shared_model.structure, torch.Generator().manual_seed(seed)
    if isinstance(layer, EmbeddingLayer):
        vocabulary = structure.model.config.get_text_config().vocab_size
        alone = torch.randint(vocabulary, _ALONE, generator=draws)
    else:
        alone = _SCALE * torch.randn(*_ALONE, structure.hidden.shape[-1], generator=draws)
    wanted = _output(layer, alone, None)[_SAMPLES, _POSITIONS]
    found = _output(layer, alone[_SAMPLES, _POSITIONS], _POSITIONS)
    return bool((found - wanted).abs().max() <= _TOLERANCE * wanted.abs().max())


def _output(layer: HuggingFaceLayer, given: Tensor, positions: Tensor | None) -> Tensor:
    """Returns hidden states or logits."""
    if isinstance(layer, EmbeddingLayer):
        return hidden_of(layer(given, None, positions))
    router = layer.shared_model.router
    sums = () if router is None else router.start(given.device)
    return hidden_of(layer(given, *(() if positions is None else (positions,)), *sums))
