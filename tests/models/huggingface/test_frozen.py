"""Layers of a model of transformers that do not train."""

from __future__ import annotations

from typing import Any

import pytest

from dynmo.errors import ConfigError
from dynmo.models.huggingface.build import frozen_layers, places
from dynmo.models.huggingface.cut import Halves
from dynmo.models.huggingface.model import from_pretrained
from tests.models.huggingface.tiny import config

PLACES = places([Halves(("attention", "mlp"), (None, None), ((), ()))] * 3)


def test_a_model_has_layers_that_do_not_train() -> None:
    model = from_pretrained(config("llama"), freeze=("embedding", 0, "blocks.1.attention"))
    trains = [any(p.requires_grad for p in layer.parameters()) for layer in model.build(())]
    assert trains == [False] * 4 + [True] * 4


@pytest.mark.parametrize(
    ("freeze", "train_last", "frozen"),
    [
        (("embedding", range(2), "head"), None, {*range(5), 7}),
        ((), 1, {*range(5)}),
        ((), 0, {*range(7)}),
    ],
)
def test_blocks_and_layers_are_frozen_by_index_and_name(
    freeze: Any, train_last: int | None, frozen: set[int]
) -> None:
    assert frozen_layers(PLACES, freeze, train_last) == frozen


@pytest.mark.parametrize(
    ("freeze", "train_last", "message"),
    [
        ((3,), None, "blocks 0 to 2"),
        (("attention",), None, "names of layers, such as 'embedding'"),
        ((), 4, "the model has 3 blocks"),
    ],
)
def test_bad_freezes_are_refused(freeze: Any, train_last: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        frozen_layers(PLACES, freeze, train_last)
    with pytest.raises(ConfigError, match="nothing is left to train"):
        from_pretrained(config("llama"), freeze=("embedding", range(3), "head"))
