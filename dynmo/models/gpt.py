"""A GPT of today's shape: RMSNorm, rotary positions, SwiGLU, as a list of layers.

    embedding | attention half | feed-forward half | ... | head        2 * blocks + 2 layers

Both halves read and write the same residual stream [microbatch, sequence, hidden]. So a boundary
may fall between any two layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from dynmo.models.loss import Loss, next_token_loss
from dynmo.models.model import Factory, Model, from_factories
from dynmo.models.options import ModelOptions


@dataclass(frozen=True)
class GptLayers:
    """Functions that make the layers of a GPT. `dataclasses.replace` gives a case its own.

    Attributes:
        model: Sizes of the layers.
        attention: Makes the attention half of a block.
        feed_forward: Makes the feed-forward half of a block.
        after: Returns functions that make layers between a block and the next, by name.
        takes_targets: As in `Model`.
    """

    model: ModelOptions
    embedding: Factory
    attention: Callable[[int], nn.Module]
    feed_forward: Callable[[int], nn.Module]
    head: Factory
    after: Callable[[int], Mapping[str, Factory]] = lambda block: {}
    loss: Loss = next_token_loss
    takes_targets: bool = False

    @classmethod
    def plain(cls, model: ModelOptions) -> GptLayers:
        """Returns the functions of a GPT without cases."""
        return cls(
            model,
            embedding=partial(Embedding, model),
            attention=lambda block: AttentionHalf(model),
            feed_forward=lambda block: FeedForwardHalf(model),
            head=partial(Head, model),
        )


def make(
    options: ModelOptions, seed: int, cases: Iterable[Any], layers: GptLayers | None = None
) -> Model:
    """Makes a GPT of `layers`, as the options of cases change them in their turns."""
    given = layers or GptLayers.plain(options)
    # A case of the user's own may have no options.
    changing = [case for case in cases if hasattr(case, "gpt_layers")]
    for case in sorted(changing, key=lambda case: getattr(case, "turn", math.inf)):
        given: GptLayers = case.gpt_layers(given)
    factories: dict[str, Factory] = {"embedding": given.embedding}
    for block in range(options.blocks):
        factories[f"blocks.{block}.attention"] = partial(given.attention, block)
        factories[f"blocks.{block}.feed_forward"] = partial(given.feed_forward, block)
        factories |= {f"blocks.{block}.{name}": each for name, each in given.after(block).items()}
    factories["head"] = given.head
    last = len(factories) - 1
    model = from_factories(
        list(factories),
        list(factories.values()),
        seed,
        given.loss,
        tied=(((0, "tokens.weight"), (last, "logits.weight")),) if options.tied else (),
        takes_targets=given.takes_targets,
    )
    return replace(model, inputs=("input_ids",))


class Embedding(nn.Module):
    """[microbatch, sequence] token ids -> [microbatch, sequence, hidden]."""

    def __init__(self, m: ModelOptions) -> None:
        super().__init__()
        self.tokens = nn.Embedding(m.vocab, m.hidden)
        self.dropout = nn.Dropout(m.dropout)
        nn.init.normal_(self.tokens.weight, std=m.init_std)

    def forward(self, ids: Tensor) -> Tensor:
        return self.dropout(self.tokens(ids))


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Applies rotary positions."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


def rotary_tables(sequence: int, size: int) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines of the rotary angles, float32 [sequence, size / 2]."""
    angle = np.outer(np.arange(sequence), 10000.0 ** (-np.arange(0, size, 2) / size))
    return torch.tensor(np.cos(angle), dtype=torch.float32), torch.tensor(
        np.sin(angle), dtype=torch.float32
    )


class RotaryAttention(nn.Module):
    """The norm, dropout and rotary tables of an attention half, without linears."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, m: ModelOptions) -> None:
        super().__init__()
        self.heads = m.heads
        self.norm = nn.RMSNorm(m.hidden, eps=1e-6)
        self.dropout = nn.Dropout(m.dropout)
        cosine, sine = rotary_tables(m.sequence, m.hidden // m.heads)
        self.register_buffer("cosine", cosine, persistent=False)
        self.register_buffer("sine", sine, persistent=False)


class AttentionHalf(RotaryAttention):
    """x + proj(attention(norm(x))), causal, rotary."""

    vectors = 3  # query, key and value, per position and head

    def __init__(self, m: ModelOptions) -> None:
        super().__init__(m)
        self.qkv = nn.Linear(m.hidden, self.vectors * m.hidden, bias=False)
        self.proj = nn.Linear(m.hidden, m.hidden, bias=False)
        nn.init.normal_(self.qkv.weight, std=m.init_std)
        nn.init.normal_(self.proj.weight, std=m.residual_std)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, hidden = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, sequence, 3, self.heads, hidden // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        cosine, sine = self.cosine[:sequence].to(x.dtype), self.sine[:sequence].to(x.dtype)
        out = functional.scaled_dot_product_attention(
            rotate(q, cosine, sine), rotate(k, cosine, sine), v, is_causal=True
        )
        return x + self.dropout(self.proj(out.transpose(1, 2).reshape(batch, sequence, hidden)))


def feed_forward_size(hidden: int) -> int:
    """Returns 8/3 of hidden, rounded up to a multiple of 32.

    SwiGLU's three matrices then weigh as much as two of 4 hidden.
    """
    return -(-8 * hidden // 3 // 32) * 32


def add_to_stream(added: Callable[[Tensor], Tensor], x: Tensor, *rest: Tensor) -> Any:
    """Returns x + added(x), and other tensors as they are."""
    return (x + added(x), *rest) if rest else x + added(x)


class AddingHalf(nn.Module):
    """A half of a block with a norm and dropout. A class over it writes `added`.

    Attributes:
        residual: Takes `added` and the inputs. Returns the outputs.
    """

    residual: Callable[..., Any] = staticmethod(add_to_stream)

    def __init__(self, m: ModelOptions) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(m.hidden, eps=1e-6)
        self.dropout = nn.Dropout(m.dropout)

    def added(self, x: Tensor) -> Tensor:
        """Returns the part that the half adds to the stream."""
        raise NotImplementedError

    def forward(self, x: Tensor, *rest: Tensor) -> Any:
        return self.residual(self.added, x, *rest)


class FeedForwardHalf(AddingHalf):
    """x + down(silu(gate(norm(x))) * up(norm(x))). Gate and up are one matrix."""

    def __init__(self, m: ModelOptions) -> None:
        super().__init__(m)
        inner = feed_forward_size(m.hidden)
        self.gate_up = nn.Linear(m.hidden, 2 * inner, bias=False)
        self.down = nn.Linear(inner, m.hidden, bias=False)
        nn.init.normal_(self.gate_up.weight, std=m.init_std)
        nn.init.normal_(self.down.weight, std=m.residual_std)

    def added(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(self.norm(x)).chunk(2, dim=-1)
        return self.dropout(self.down(functional.silu(gate) * up))


class Head(nn.Module):
    """[microbatch, sequence, hidden] -> logits [microbatch, sequence, vocab]."""

    def __init__(self, m: ModelOptions) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(m.hidden, eps=1e-6)
        self.logits = nn.Linear(m.hidden, m.vocab, bias=False)
        nn.init.normal_(self.logits.weight, std=m.init_std)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(self.norm(x))
