"""The parts of a GPT for one token at a time, from their formulas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dynmo.config import Config, parse
from dynmo.train.setup import model_of

Token = tuple[int, int]
"""Row, position."""
Heads = dict[Token, list[Tensor]]
"""The queries, keys or values of tokens: [size] of each head."""


class TooCloseError(Exception):
    """float32 and float64 may decide differently."""


def rms_norm(x: Tensor, scale: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean() + 1e-6) * scale


def rotated(x: Tensor, position: int) -> Tensor:
    """One head's query or key. The pair (i, i + size / 2) turns by position / 10000^(2i / size)."""
    half, first, second = len(x) // 2, [], []
    for i in range(half):
        angle = position * 10000.0 ** (-2 * i / len(x))
        first.append(x[i] * math.cos(angle) - x[i + half] * math.sin(angle))
        second.append(x[i + half] * math.cos(angle) + x[i] * math.sin(angle))
    return torch.stack(first + second)


def attended(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """The values, weighed by the softmax of query * key / sqrt(size)."""
    weights = torch.softmax(torch.stack(list(keys)) @ query / len(query) ** 0.5, 0)
    return weights @ torch.stack(list(values))


def rotated_heads(x: Tensor, heads: int, token: Token) -> list[Tensor]:
    """[hidden] -> one rotated [size] a head."""
    return [rotated(head, token[1]) for head in x.view(heads, -1)]


def attended_heads(token: Token, query: Sequence[Tensor], keys: Heads, values: Heads) -> Tensor:
    """The attention of a token to itself and the earlier tokens of its row, [hidden]."""
    row, t = token
    seen = [(row, earlier) for earlier in range(t + 1) if (row, earlier) in keys]
    heads = enumerate(query)
    pairs = [(q, [keys[s][h] for s in seen], [values[s][h] for s in seen]) for h, q in heads]
    return torch.cat([attended(*each) for each in pairs])


def token_loss(head: Any, state: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The logits of a token under a head, and their cross entropy."""
    logits = head.logits.weight @ rms_norm(state, head.norm.weight)
    return logits, torch.logsumexp(logits, 0) - logits[int(target)]


def fed_forward(half: Any, x: Tensor) -> Tensor:
    """The value that a feed-forward half adds to a token: down(silu(gate) * up)."""
    inner = half.gate_up.weight @ rms_norm(x, half.norm.weight)
    gate, up = inner[: len(inner) // 2], inner[len(inner) // 2 :]
    return half.down.weight @ (gate / (1 + torch.exp(-gate)) * up)


def binary_cross_entropy(guess: Tensor, right: bool) -> Tensor:
    """-log of the sigmoid of the guess, or of its complement."""
    return torch.log1p(torch.exp(-guess if right else guess))


def gradients(modules: Sequence[nn.Module], loss: Tensor) -> dict[str, Tensor]:
    pairs = [(i, *each) for i, module in enumerate(modules) for each in module.named_parameters()]
    inputs = [p for *_, p in pairs]
    taken = torch.autograd.grad(loss, inputs, retain_graph=True, materialize_grads=True)
    return {f"{i}.{name}": g for (i, name, _), g in zip(pairs, taken, strict=True)}


def config_of(
    case: str, options: dict[str, Any], sequence: int, blocks: int, heads: int, vocab: int
) -> Config:
    sizes = {"blocks": blocks, "hidden": 4 * heads, "vocab": vocab, "sequence": sequence}
    dynamism = {"cases": [case], case: options}
    return parse({"model": sizes | {"heads": heads}, "dynamism": dynamism})


def build(config: Config, seed: int, training: bool) -> list[nn.Module]:
    """All parameters have values of about 1 / sqrt(fan-in), in float64."""
    generator, model = torch.Generator().manual_seed(seed), model_of(config)
    modules = model.build(range(model.layers))
    for module in modules:
        module.double().train(training)
        for parameter in module.parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            fan_in = parameter.shape[-1]
            parameter.data.copy_(values / fan_in**0.5 if parameter.dim() == 2 else 1 + 0.3 * values)
    return modules
