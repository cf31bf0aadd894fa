"""The check that layers keep the samples of a packed row apart."""

from __future__ import annotations

import pytest

from dynmo.errors import ConfigError
from dynmo.models.huggingface.rows import check_packing
from tests.combinations import mostly_matrix
from tests.models.huggingface.tiny import model_of

PASSING = ["llama", "gpt2", "gpt_neox", "gemma3_text", "deepseek_v3"]
MIXING = [
    ("bloom", r"blocks\.0"),  # ALiBi
    ("roberta", "embedding"),  # positions that begin after the id of padding
    ("mamba", r"blocks\.0"),
    ("qwen3_5_text", r"blocks\.0\.attention"),  # linear attention beside others
    ("lfm2_moe", r"blocks\.0\.attention"),  # a convolution, which adds little to the residual
]


@pytest.mark.parametrize("kind", mostly_matrix(PASSING, PASSING[:2]))
def test_models_that_mask_by_positions_pass(kind: str) -> None:
    model = model_of(kind)
    check_packing(model, range(model.layers))


def test_routers_with_a_loss_pass() -> None:
    model = model_of("mixtral", output_router_logits=True)
    check_packing(model, range(model.layers))


@pytest.mark.parametrize(("kind", "layer"), mostly_matrix(MIXING, [MIXING[1], MIXING[4]]))
def test_models_that_mix_samples_are_refused(kind: str, layer: str) -> None:
    model = model_of(kind)
    with pytest.raises(ConfigError, match=rf"row apart in its layer {layer};") as raised:
        check_packing(model, range(model.layers))
    assert "\n" not in str(raised.value)


def test_each_rank_checks_its_own_layers() -> None:
    model = model_of("lfm2_moe")
    assert model.names[3:5] == ("blocks.1.attention", "blocks.1.feed-forward")
    check_packing(model, (3, 4))
    with pytest.raises(ConfigError, match="does not keep"):
        check_packing(model, (1,))
