"""Layers that a rank builds: shared weights, buffers, halves that are checked, and progress."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from dynmo.errors import ConfigError
from dynmo.models.huggingface import build
from dynmo.models.huggingface.build import frozen_layers, layer_specs
from dynmo.models.huggingface.halves import BlockHalves
from dynmo.models.huggingface.model import from_pretrained
from tests.combinations import mostly_matrix
from tests.models.huggingface.families import whole_model
from tests.models.huggingface.tiny import config, model_of

CLS = "cls.predictions."
TIED = [
    ("llama", ()),
    ("gpt2", (((0, "transformer.wte.weight"), (7, "lm_head.weight")),)),
    (
        "bert",  # one layer has the bias under two names
        (
            ((0, "bert.embeddings.word_embeddings.weight"), (4, CLS + "decoder.weight")),
            ((4, CLS + "bias"), (4, CLS + "decoder.bias")),
        ),
    ),
]


@pytest.mark.parametrize(("kind", "tied"), mostly_matrix(TIED, TIED[:2]))
@pytest.mark.filterwarnings("ignore")  # those of transformers' own code
def test_a_weight_with_two_names_has_an_owner(kind: str, tied: object) -> None:
    assert model_of(kind).tied == tied


def test_layers_that_are_read_are_told_now_and_then(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of()
    caplog.set_level(logging.INFO, build.__name__)
    caplog.clear()
    model.build(range(2))
    assert caplog.messages == []
    monkeypatch.setattr(build, "_EVERY", 0.0)
    model.build(range(2))
    assert caplog.messages == [f"read {number} of this rank's 2 layers" for number in (1, 2)]


def test_halves_that_compute_other_numbers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    monkeypatch.setattr(
        "dynmo.models.huggingface.stubs.AddsNothing.forward",
        lambda self, *args, **kwargs: (torch.ones(1), None) if self._elements else torch.ones(1),
    )
    with pytest.raises(ConfigError, match=r"block 0 \(LlamaDecoderLayer\): its halves compute"):
        model.build(range(model.layers))


def test_a_rank_with_one_half_has_nothing_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    compare = "dynmo.models.huggingface.build.keeps_numbers"
    monkeypatch.setattr(compare, lambda *_: pytest.fail("compared"))
    model_of().build((2, 3))


def test_weights_that_transformers_does_not_draw_are_refused() -> None:
    model = model_of("openai-gpt")
    with pytest.raises(ConfigError, match=r"attn\.c_attn\.weight has no value"):
        model.build((1,))


def test_buffers_without_values_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PreTrainedModel, "_init_weights", lambda *_: None)
    with pytest.raises(ConfigError, match=r"model\.rotary_emb\.inv_freq has no value"):
        from_pretrained(config("llama"))


@pytest.mark.matrix
def test_a_model_that_fills_the_buffers_of_its_blocks_finds_them() -> None:
    wanted = whole_model(config("falcon_h1")).get_buffer("model.layers.1.mamba.mup_vector")
    found: Any = model_of("falcon_h1").build((2,))[2]
    assert torch.equal(found.get_buffer("model.layers.1.mamba.mup_vector"), wanted)


SPECS = layer_specs([BlockHalves(("attention", "mlp"), (None, None), ((), ()))] * 3)


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
    assert frozen_layers(SPECS, freeze, train_last) == frozen


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
        frozen_layers(SPECS, freeze, train_last)
    with pytest.raises(ConfigError, match="nothing is left to train"):
        from_pretrained(config("llama"), freeze=("embedding", range(3), "head"))
