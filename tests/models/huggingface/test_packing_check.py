"""The check that layers keep the samples of a packed row apart."""

from __future__ import annotations

import pytest

from dynmo.errors import ConfigError
from dynmo.models.huggingface.model import from_pretrained
from dynmo.models.huggingface.packing_check import check_packing
from tests.models.huggingface import tiny


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gpt_neox", "gemma3_text", "deepseek_v3"])
def test_models_that_mask_by_positions_pass(kind: str) -> None:
    model = from_pretrained(tiny.config(kind))
    check_packing(model, range(model.layers))


def test_routers_with_a_loss_pass() -> None:
    model = from_pretrained(tiny.config("mixtral"), output_router_logits=True)
    check_packing(model, range(model.layers))


@pytest.mark.parametrize(
    ("kind", "layer"),
    [
        ("bloom", r"blocks\.0"),  # ALiBi
        ("roberta", "embedding"),  # positions that begin after the id of padding
        ("mamba", r"blocks\.0"),
        ("qwen3_5_text", r"blocks\.0\.attention"),  # linear attention beside others
        ("lfm2_moe", r"blocks\.0\.attention"),  # a convolution, which adds little to the residual
    ],
)
def test_models_that_mix_samples_are_refused(kind: str, layer: str) -> None:
    model = from_pretrained(tiny.config(kind))
    with pytest.raises(ConfigError, match=rf"row apart in its layer {layer};") as raised:
        check_packing(model, range(model.layers))
    assert "\n" not in str(raised.value)


def test_each_rank_checks_its_own_layers() -> None:
    model = from_pretrained(tiny.config("lfm2_moe"))
    assert model.names[3:5] == ("blocks.1.attention", "blocks.1.feed-forward")
    check_packing(model, (3, 4))
    with pytest.raises(ConfigError, match="does not keep"):
        check_packing(model, (1,))
