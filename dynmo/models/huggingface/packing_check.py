"""Checks on real values that a model keeps the samples of a packed row apart.

Code that ignores position ids mixes them: ALiBi, recurrent layers, convolutions. The layers of a
rank are checked one by one, since no rank has the whole model. Each must give the tokens of a
sample in a packed row what it gives them in a row of their own.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from dynmo.errors import ConfigError
from dynmo.models.huggingface.halves_check import evaluated
from dynmo.models.huggingface.model import HuggingFaceModel
from dynmo.models.huggingface.shells import EmbeddingShell, Shell, hidden_of

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


def check_packing(model: HuggingFaceModel, owned: Collection[int]) -> None:
    """Loads layers, and checks them.

    Raises:
        ConfigError: A layer mixes the samples of a row.
    """
    layers = model.build(owned)
    for index in sorted(owned):
        _check(layers[index], model.names[index])


def _check(layer: nn.Module, name: str) -> None:
    assert isinstance(layer, Shell)
    model = layer.frame.structure.model
    with evaluated(layer), torch.no_grad(), torch.device("cpu"):
        if not any(_keeps_apart(layer, draw) for draw in range(_DRAWS)):
            raise ConfigError(
                f'data.batching = "packed": {type(model).__name__} does not keep the samples of a '
                f'row apart in its layer {name}; use "grouped"'
            )


def _keeps_apart(layer: Shell, seed: int) -> bool:
    structure, draws = layer.frame.structure, torch.Generator().manual_seed(seed)
    if isinstance(layer, EmbeddingShell):
        vocabulary = structure.model.config.get_text_config().vocab_size
        alone = torch.randint(vocabulary, _ALONE, generator=draws)
    else:
        alone = _SCALE * torch.randn(*_ALONE, structure.hidden.shape[-1], generator=draws)
    wanted = _output(layer, alone, None)[_SAMPLES, _POSITIONS]
    found = _output(layer, alone[_SAMPLES, _POSITIONS], _POSITIONS)
    return bool((found - wanted).abs().max() <= _TOLERANCE * wanted.abs().max())


def _output(layer: Shell, given: Tensor, positions: Tensor | None) -> Tensor:
    """Returns hidden states or logits."""
    if isinstance(layer, EmbeddingShell):
        return hidden_of(layer(given, None, positions))
    router = layer.frame.router
    sums = () if router is None else router.start(given.device)
    return hidden_of(layer(given, *(() if positions is None else (positions,)), *sums))
