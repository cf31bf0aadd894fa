"""The GPT: size, causality, rotary positions and initial weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dynmo.config import parse
from dynmo.models.gpt import feed_forward_size, rotate
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
    assert model.names == (
        "embedding",
        "blocks.0.attention",
        "blocks.0.feed_forward",
        "blocks.1.attention",
        "blocks.1.feed_forward",
        "head",
    )
    inner = 96  # 8/3 of 32 is 85.3, and the next multiple of 32
    attention, feed_forward = 32 + 32 * 3 * 32 + 32 * 32, 32 + 32 * 2 * inner + inner * 32
    assert feed_forward_size(32) == inner
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in model.build(())]
    assert sizes == [300 * 32, attention, feed_forward, attention, feed_forward, 32 + 32 * 300]


def test_feed_forward_size_is_a_multiple_of_32() -> None:
    assert [feed_forward_size(h) for h in (12, 24, 36, 256, 4096)] == [32, 64, 96, 704, 10944]
    assert all(
        feed_forward_size(h) % 32 == 0 and 0 <= feed_forward_size(h) - 8 * h / 3 < 32
        for h in range(1, 500)
    )


def test_gpt_is_causal() -> None:
    layers = build()
    ids = torch.randint(300, (2, 12))
    changed = ids.clone()
    changed[:, 7] = (ids[:, 7] + 1) % 300
    before, after = logits(layers, ids), logits(layers, changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert (before[:, 7:] != after[:, 7:]).any(-1).all(), "every later position sees the change"


def test_shorter_sequences_have_the_same_logits() -> None:
    layers = build()
    ids = torch.randint(300, (2, 12))
    torch.testing.assert_close(logits(layers, ids)[:, :5], logits(layers, ids[:, :5]))


def test_rotary_positions_are_relative() -> None:
    angle = torch.outer(torch.arange(10.0), torch.tensor([1.0, 0.1, 0.01]))
    q, k = torch.randn(6), torch.randn(6)
    turned = [rotate(x.expand(1, 1, 10, 6), angle.cos(), angle.sin())[0, 0] for x in (q, k)]
    scores = turned[0] @ turned[1].T
    for distance in range(-9, 10):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert (scores[0, 1] - scores[0, 2]).abs() > 1e-3
    torch.testing.assert_close(turned[0].norm(dim=-1), q.norm().expand(10))


def test_initial_weights_have_the_configured_spread() -> None:
    """Weights that write to the residual stream have a smaller spread."""
    layers = build(hidden=128, vocab=512, init_std=0.05)
    spread = {
        name: float(p.detach().std())
        for layer in layers
        for name, p in layer.named_parameters()
        if p.dim() == 2
    }
    assert all(
        0.9 < spread[name] / 0.05 < 1.1
        for name in ("tokens.weight", "qkv.weight", "gate_up.weight", "logits.weight")
    )
    assert all(0.9 < spread[name] / 0.025 < 1.1 for name in ("proj.weight", "down.weight"))
    assert not torch.equal(
        layers[1].get_parameter("qkv.weight"), layers[3].get_parameter("qkv.weight")
    )


def test_dropout_acts_in_training_only() -> None:
    layers = build(dropout=0.5)
    ids = torch.randint(300, (1, 12))
    assert not torch.equal(logits(layers, ids), logits(layers, ids))
    for layer in layers:
        layer.eval()
    assert torch.equal(logits(layers, ids), logits(layers, ids))
