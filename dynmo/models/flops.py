"""What a token is multiplied by in a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from dynmo.kernels.grouped_linear import GroupedLinear
from dynmo.models.model import Model


def product_weights(model: Model, layers: Iterable[nn.Module]) -> int | None:
    """Counts the weights that a token is multiplied by.

    Embeddings are looked up, and vectors such as biases are no matrices. Of groups of weights
    (experts), those count that compute a token.

    Args:
        model: The model of these layers.
        layers: All layers of the model. They may be on the meta device.

    Returns:
        The number of weights. None if no arithmetic of this kind holds, as with convolutions.
    """
    experts, chosen = _experts(model)
    total = 0
    for layer in layers:
        for module in layer.modules():
            if isinstance(module, nn.Embedding):
                continue
            for parameter in module.parameters(recurse=False):
                size = parameter.numel()
                if parameter.dim() > 3 or (parameter.dim() == 3 and not experts):
                    return None
                if isinstance(module, GroupedLinear):
                    total += size * module.per_token // module.groups
                elif parameter.dim() == 3:
                    total += size * chosen // experts
                elif parameter.dim() == 2:
                    total += size
    return total


def _experts(model: Model) -> tuple[int, int]:
    """Returns transformers' experts of a layer, and how many of them compute a token."""
    config: Any = getattr(model, "config", None)
    if config is None:
        return 0, 0
    text = config.get_text_config()
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    found = (getattr(text, name, None) for name in names)
    return next(filter(None, found), 0), getattr(text, "num_experts_per_tok", None) or 0
