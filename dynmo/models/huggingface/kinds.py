"""What makes the layers of a transformers model. `dynmo.extend.hugging_face` gives it to cases."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import nn

from dynmo.models.huggingface.halves import BlockHalves
from dynmo.models.huggingface.layers import (
    BlockLayer,
    Carried,
    EmbeddingLayer,
    HeadLayer,
    HuggingFaceLayer,
    SharedModel,
    unpacked,
    without_sums,
)
from dynmo.models.huggingface.router import RouterLoss
from dynmo.models.huggingface.stubs import Unowned, with_module
from dynmo.models.loss import Loss, next_labels

__all__ = [
    "BlockLayer",
    "Carried",
    "EmbeddingLayer",
    "HeadLayer",
    "HuggingFaceLayer",
    "LayerKinds",
    "LayerSpec",
    "Loss",
    "RouterLoss",
    "SharedModel",
    "Unowned",
    "next_labels",
    "unpacked",
    "with_module",
    "without_sums",
]


@dataclass(frozen=True)
class LayerSpec:
    """What a layer of dynmo has of a transformers model.

    Attributes:
        name: Name of the layer.
        block: Index of the block. None for embedding and head.
        halves: How the block is cut. None leaves it whole.
        half: 0 for attention, 1 for the feed-forward.
        behind: Index of the block behind which it is a further head. None: it is none.
    """

    name: str
    block: int | None = None
    halves: BlockHalves | None = None
    half: int = 0
    behind: int | None = None


@dataclass(frozen=True)
class LayerKinds:
    """What makes the layers of a transformers model. `dataclasses.replace` gives a case its own.

    Attributes:
        blocks: Number of blocks.
        width: Last dimension of the hidden states.
        std: Standard deviation of weights that are drawn.
        heads: Makes a layer of a further head, by the block behind which it stands. The head has
            the weights of the last layer.
        whole: Blocks that are not cut into halves.
        loss: Takes the loss of the logits, and of the routers. Returns that of what the last layer
            returns. None: the last layer returns what it does without cases.
        takes_labels: Whether the first layer takes the labels of the batch, too.
    """

    blocks: int
    width: int
    std: float
    embedding: Callable[[SharedModel, Mapping[str, nn.Module], str], EmbeddingLayer] = (
        EmbeddingLayer
    )
    block: Callable[[SharedModel, LayerSpec, nn.Module], BlockLayer] = (
        lambda shared_model, spec, block: BlockLayer(shared_model, spec.block or 0, block)
    )
    head: Callable[[SharedModel, Mapping[str, nn.Module], str], HeadLayer] = HeadLayer
    heads: Mapping[int, Callable[[HeadLayer], HuggingFaceLayer]] = field(
        default_factory=dict[int, Callable[[HeadLayer], HuggingFaceLayer]]
    )
    whole: frozenset[int] = frozenset()
    loss: Callable[[Loss, RouterLoss | None], Loss] | None = None
    takes_labels: bool = False
