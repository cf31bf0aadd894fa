"""A GPT of today's shape: RMSNorm, rotary positions, SwiGLU, as a list of layers.

    embedding | attention half | feed-forward half | ... | head        2 * blocks + 2 layers

Both halves read and write the same residual stream [microbatch, sequence, hidden]. So a boundary
may fall between any two layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from dynmo.kernels import shared_qk
from dynmo.kernels.shared_qk import SparseAttention


class Embedding(nn.Module):
    """[microbatch, sequence] token ids -> [microbatch, sequence, hidden]."""

    def __init__(self, vocab: int, hidden: int, std: float, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, hidden)
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.tokens.weight, std=std)

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


@dataclass(frozen=True)
class AttentionOptions:
    """The options of an attention half. `residual_std` is the `std` of the projection."""

    hidden: int
    heads: int
    sequence: int
    std: float
    residual_std: float
    dropout: float


class RotaryAttention(nn.Module):
    """The norm, dropout and rotary tables of an attention half, without linears."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, options: AttentionOptions) -> None:
        super().__init__()
        self.heads = options.heads
        self.norm = nn.RMSNorm(options.hidden, eps=1e-6)
        self.dropout = nn.Dropout(options.dropout)
        cosine, sine = rotary_tables(options.sequence, options.hidden // options.heads)
        self.register_buffer("cosine", cosine, persistent=False)
        self.register_buffer("sine", sine, persistent=False)


class AttentionHalf(RotaryAttention):
    """x + proj(attention(norm(x))), causal, rotary."""

    vectors = 3  # query, key and value, per position and head

    def __init__(self, options: AttentionOptions) -> None:
        super().__init__(options)
        hidden = options.hidden
        self.qkv = nn.Linear(hidden, self.vectors * hidden, bias=False)
        self.proj = nn.Linear(hidden, hidden, bias=False)
        nn.init.normal_(self.qkv.weight, std=options.std)
        nn.init.normal_(self.proj.weight, std=options.residual_std)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, hidden = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, sequence, 3, self.heads, hidden // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        cosine, sine = self.cosine[:sequence].to(x.dtype), self.sine[:sequence].to(x.dtype)
        out = functional.scaled_dot_product_attention(
            rotate(q, cosine, sine), rotate(k, cosine, sine), v, is_causal=True
        )
        return x + self.dropout(self.proj(out.transpose(1, 2).reshape(batch, sequence, hidden)))


class SharedAttentionHalf(AttentionHalf):
    """Attention with one vector as query and normalised key, which can be sparse.

    Attributes:
        sparse_attention: The kernel that leaves out pairs. The case of that name sets it.
    """

    vectors = 2  # query and key in one, and the value
    sparse_attention: SparseAttention | None = None

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, hidden = x.shape
        both, v = (
            self.qkv(self.norm(x))
            .view(batch, sequence, 2, self.heads, hidden // self.heads)
            .unbind(2)
        )
        cosine, sine = (t[:sequence, None].to(x.dtype) for t in (self.cosine, self.sine))
        both = rotate(both, cosine, sine)
        out = (
            shared_qk.dense_attention(both, v)
            if self.sparse_attention is None
            else self.sparse_attention(both, v)
        )
        return x + self.dropout(self.proj(out.reshape(batch, sequence, hidden)))


def feed_forward_size(hidden: int) -> int:
    """Returns 8/3 of hidden, rounded up to a multiple of 32.

    SwiGLU's three matrices then weigh as much as two of 4 hidden.
    """
    return -(-8 * hidden // 3 // 32) * 32


class FeedForwardHalf(nn.Module):
    """x + down(silu(gate(norm(x))) * up(norm(x))). Gate and up are one matrix."""

    def __init__(self, hidden: int, std: float, residual_std: float, dropout: float) -> None:
        super().__init__()
        inner = feed_forward_size(hidden)
        self.norm = nn.RMSNorm(hidden, eps=1e-6)
        self.gate_up = nn.Linear(hidden, 2 * inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.gate_up.weight, std=std)
        nn.init.normal_(self.down.weight, std=residual_std)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.added(x)

    def added(self, x: Tensor) -> Tensor:
        """Returns the part that the half adds to the stream."""
        gate, up = self.gate_up(self.norm(x)).chunk(2, dim=-1)
        return self.dropout(self.down(functional.silu(gate) * up))


class Head(nn.Module):
    """[microbatch, sequence, hidden] -> logits [microbatch, sequence, vocab]."""

    def __init__(self, hidden: int, vocab: int, std: float) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden, eps=1e-6)
        self.logits = nn.Linear(hidden, vocab, bias=False)
        nn.init.normal_(self.logits.weight, std=std)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(self.norm(x))
