"""Layers of a model of transformers that do not train."""

from __future__ import annotations

from typing import Any

import pytest

from dynmo.errors import ConfigError
from dynmo.models.huggingface.model import from_pretrained
from tests.models.huggingface.small import config_of


def trained(**options: Any) -> list[str]:
    model = from_pretrained(config_of("llama"), **options)
    layers = zip(model.names, model.build(()), strict=True)
    return [name for name, layer in layers if any(p.requires_grad for p in layer.parameters())]


def test_blocks_and_layers_are_frozen_by_index_and_name() -> None:
    halves = ["blocks.1.feed-forward", "blocks.2.attention", "blocks.2.feed-forward"]
    assert trained(freeze=("embedding", 0, "blocks.1.attention")) == [*halves, "head"]
    assert trained(freeze=("embedding", range(2), "head")) == halves[1:]
    assert trained(train_last=1) == [*halves[1:], "head"]
    assert trained(train_last=0) == ["head"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"freeze": (3,)}, "blocks 0 to 2"),
        ({"freeze": ("attention",)}, "names of layers, such as 'embedding'"),
        ({"train_last": 4}, "the model has 3 blocks"),
        ({"freeze": ("embedding", range(3), "head")}, "nothing is left to train"),
    ],
)
def test_what_cannot_be_frozen_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trained(**options)
