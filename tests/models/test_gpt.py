"""The GPT: size, causality, rotary positions and initial weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import dynmo
from dynmo.config import parse
from dynmo.extend import CaseOptions, gpt
from dynmo.models.gpt import feed_forward_size
from dynmo.train.setup import model_of

WANTED: dict[str, Any] = {"blocks": 2, "hidden": 32, "heads": 4, "vocab": 300, "sequence": 12}


def build(**changes: Any) -> list[nn.Module]:
    model = model_of(parse({"model": WANTED | changes}))
    return model.build(range(model.layers))


def logits(layers: list[nn.Module], ids: Tensor) -> Tensor:
    x = ids
    for layer in layers:
        x = layer(x)
    return x


def test_layers_and_parameters() -> None:
    model = model_of(parse({"model": WANTED}))
    kinds = ("attention", "feed_forward")
    halves = [f"blocks.{block}.{kind}" for block in (0, 1) for kind in kinds]
    assert model.names == ("embedding", *halves, "head")
    inner = 96  # 8/3 of 32 is 85.3, and the next multiple of 32
    attention, feed_forward = 32 + 32 * 3 * 32 + 32 * 32, 32 + 32 * 2 * inner + inner * 32
    assert feed_forward_size(32) == inner
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in model.build(())]
    assert sizes == [300 * 32, attention, feed_forward, attention, feed_forward, 32 + 32 * 300]


def test_feed_forward_size_is_a_multiple_of_32() -> None:
    sizes = [feed_forward_size(h) for h in (12, 24, 36, 256, 4096, *range(1, 500))]
    assert sizes[:5] == [32, 64, 96, 704, 10944]
    assert all(n % 32 == 0 <= n - 8 * h / 3 < 32 for h, n in enumerate(sizes[5:], 1))


def test_gpt_is_causal() -> None:
    layers = build()
    ids = torch.randint(300, (2, 12))
    changed = ids.clone()
    changed[:, 7] = (ids[:, 7] + 1) % 300
    before, after = logits(layers, ids), logits(layers, changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert (before[:, 7:] != after[:, 7:]).any(-1).all(), "every later position sees the change"
    torch.testing.assert_close(before[:, :5], logits(layers, ids[:, :5]))


def test_initial_weights_have_the_configured_spread() -> None:
    """Weights that write to the residual stream have a smaller spread."""
    layers = build(hidden=128, vocab=512, init_std=0.05)
    named = [each for layer in layers for each in layer.named_parameters()]
    spread = {name: float(p.detach().std()) for name, p in named if p.dim() == 2}
    for name in ("tokens", "qkv", "gate_up", "logits", "proj", "down"):
        wanted = 0.025 if name in ("proj", "down") else 0.05
        assert 0.9 < spread[f"{name}.weight"] / wanted < 1.1
    first, second = (layers[i].get_parameter("qkv.weight") for i in (1, 3))
    assert not torch.equal(first, second)


def test_dropout_acts_in_training_only() -> None:
    layers = build(dropout=0.5)
    ids = torch.randint(300, (1, 12))
    assert not torch.equal(logits(layers, ids), logits(layers, ids))
    for layer in layers:
        layer.eval()
    assert torch.equal(logits(layers, ids), logits(layers, ids))


class Adapted(CaseOptions):
    """Options of a case of the user's own: a further layer stands behind the first block."""

    name: ClassVar[str] = "adapted"

    def gpt_layers(self, layers: gpt.GptLayers) -> gpt.GptLayers:
        def after(block: int) -> dict[str, Callable[[], nn.Module]]:
            further = {"adapter": lambda: nn.Linear(32, 32)} if block == 0 else {}
            return {**layers.after(block), **further}

        return replace(layers, after=after)


@pytest.mark.parametrize("turn", [0, 4])
def test_cases_change_the_layers_in_their_turns(turn: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Adapted, "turn", turn)
    options = dynmo.ModelOptions(**WANTED | {"kind": "moe", "moe_every": 2})
    model = dynmo.load_model(options, cases=[dynmo.EarlyExit(exits=[0]), Adapted()])
    first = ["blocks.0.attention", "blocks.0.feed_forward"]
    first += ["blocks.0.exit", "blocks.0.adapter"][:: 1 if turn else -1]
    second = ["blocks.1.attention", "blocks.1.feed_forward"]
    assert model.names == ("embedding", *first, *second, "head")
    kinds = [type(layer).__name__ for layer in model.build(())]
    further = ["ExitHead", "Linear"][:: 1 if turn else -1]
    expected = ["FeedForwardHalf", *further, "ExitAttentionHalf", "ExpertsHalf"]
    assert kinds[1:7] == ["ExitAttentionHalf", *expected]
