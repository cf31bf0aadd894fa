"""Buffers that no file has, and weights that are drawn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from dynmo.errors import ConfigError
from dynmo.models.huggingface.model import from_pretrained
from tests.models.huggingface.families import whole_model
from tests.models.huggingface.tiny import config, model_of


def test_weights_that_transformers_does_not_draw_are_refused() -> None:
    model = model_of("openai-gpt")
    with pytest.raises(ConfigError, match=r"attn\.c_attn\.weight cannot be drawn"):
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
