"""Weights that layers share."""

from __future__ import annotations

import pytest

from tests.models.huggingface.tiny import model_of


@pytest.mark.parametrize(
    ("kind", "tied"),
    [
        ("llama", ()),
        ("gpt2", (((0, "transformer.wte.weight"), (7, "lm_head.weight")),)),
        pytest.param(
            "bert",
            (
                (
                    (0, "bert.embeddings.word_embeddings.weight"),
                    (4, "cls.predictions.decoder.weight"),
                ),
                # One layer has the weight under two names.
                ((4, "cls.predictions.bias"), (4, "cls.predictions.decoder.bias")),
            ),
            marks=pytest.mark.matrix,
        ),
    ],
)
@pytest.mark.filterwarnings("ignore")  # those of transformers' own code
def test_a_weight_with_two_names_has_an_owner(kind: str, tied: object) -> None:
    assert model_of(kind).tied == tied
