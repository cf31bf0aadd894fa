"""An attention half whose attention can be sparse."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dynmo.cases.sparse_attention.dropped import Dropped
from dynmo.cases.sparse_attention.hashed import Hashed
from dynmo.cases.sparse_attention.shared import SparseAttention, dense_attention
from dynmo.extend import gpt


class SharedAttentionHalf(gpt.AttentionHalf):
    """Attention with one vector as query and normalised key, which can be sparse.

    Attributes:
        sparse_attention: The kernel that leaves out pairs. The case of that name sets it.
    """

    vectors = 2  # query and key in one, and the value
    sparse_attention: SparseAttention | None = None
    uncompiled_classes = (Hashed, Dropped)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, hidden = x.shape
        pair = self.qkv(self.norm(x)).view(batch, sequence, 2, self.heads, hidden // self.heads)
        both, v = pair.unbind(2)
        cosine, sine = (t[:sequence, None].to(x.dtype) for t in (self.cosine, self.sine))
        attend = self.sparse_attention or dense_attention
        out = attend(gpt.rotate(both, cosine, sine), v)
        return x + self.dropout(self.proj(out.reshape(batch, sequence, hidden)))


def gpt_layers(layers: gpt.GptLayers) -> gpt.GptLayers:
    """Returns the layers of a GPT whose attention can be sparse."""
    return replace(layers, attention=lambda block: SharedAttentionHalf(layers.model))


def compile_ahead() -> None:
    """Compiles the loops of both kinds."""
    x, v = (torch.randn(2, 8, 2, 4, requires_grad=True) for _ in range(2))
    for attention in (Hashed(2, 4, seed=0), Dropped(0.5, 4, seed=0)):
        attention(x, v).sum().backward()
