"""Tensors that are only handed on: bytes sent and kept with rotary tables between layers.

A small Llama shape in halves. Its embedding makes the rotary tables of a microbatch, [rows,
sequence, head size] twice, and every layer hands them on beside the hidden states. The model is cut
in the middle, over two ranks of one thread.

    constant         the tables require no gradient: no graph, no gradient message
    differentiated   the tables require one, so that each layer computes it and sends it back

`forwards` and `backwards` are the bytes that cross the boundary in a step, `kept` the bytes that
autograd keeps of a microbatch. The weights after the step are the same on both sides.
"""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional

import dynmo
from benchmarks.harness import run_ranks
from benchmarks.output import main
from dynmo.models.gpt import FeedForwardHalf, Head
from dynmo.models.options import ModelOptions
from dynmo.runtime.comm.headers import TAG_LINKS
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.comm.rank_group import RankGroup

VOCABULARY, HEAD_SIZE, ROWS, MICROBATCHES = 256, 64, 3, 4

Carried = tuple[Tensor, Tensor, Tensor]


class Embed(nn.Module):
    """[rows, sequence] ids -> hidden states, cosines and sines."""

    def __init__(self, hidden: int, differentiated: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, hidden)
        self.differentiated = differentiated

    def forward(self, ids: Tensor) -> Carried:
        rates = 10000.0 ** (-torch.arange(0, HEAD_SIZE, 2) / HEAD_SIZE)
        angles = torch.arange(ids.shape[1]).expand(ids.shape)[..., None] * rates.repeat(2)
        tables = angles.cos(), angles.sin()
        for table in tables if self.differentiated else ():
            table.requires_grad_()
        return self.tokens(ids), *tables


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cosine[:, None] + torch.cat((-second, first), dim=-1) * sine[:, None]


class Attention(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.proj = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Carried:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, -1, HEAD_SIZE)).permute(2, 0, 3, 1, 4)
        out = functional.scaled_dot_product_attention(
            rotate(q, cosine, sine), rotate(k, cosine, sine), v, is_causal=True
        )
        return x + self.proj(out.transpose(1, 2).flatten(2)), cosine, sine


class Beside(nn.Module):
    """A layer that needs no tables. `hands_on`: whether the next one gets them."""

    def __init__(self, layer: nn.Module, hands_on: bool = True) -> None:
        super().__init__()
        self.layer, self.hands_on = layer, hands_on

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor | Carried:
        y = self.layer(x)
        return (y, cosine, sine) if self.hands_on else y


def make_layers(hidden: int, blocks: int, differentiated: bool) -> list[nn.Module]:
    torch.manual_seed(0)
    options = ModelOptions(hidden=hidden, vocab=VOCABULARY)
    halves = [
        half
        for _ in range(blocks)
        for half in (Attention(hidden), Beside(FeedForwardHalf(options)))
    ]
    head = Beside(Head(options), hands_on=False)
    return [Embed(hidden, differentiated), *halves, head]


def sides(world: Meeting, hidden: int, blocks: int, sequence: int) -> dict[str, Any] | None:
    """Runs one step of both sides."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (MICROBATCHES * ROWS, sequence), generator=generator)
    both = {
        name: side(world, make_layers(hidden, blocks, name == "differentiated"), ids)
        for name in ("constant", "differentiated")
    }
    digests = {figures.pop("digest") for figures in both.values()}
    saved = {
        f"{what}_saved": 1 - both["constant"][what] / both["differentiated"][what]
        for what in ("backwards", "kept")
    }
    return None if world.rank else both | saved | {"same_weights": len(digests) == 1}


def side(world: Meeting, layers: list[nn.Module], ids: Tensor) -> dict[str, Any]:
    """Trains one step, and counts the bytes of what the ranks send to each other."""
    pipeline = dynmo.Pipeline(
        dynmo.Sequential(layers), world, schedule="zb-h1", microbatches=MICROBATCHES
    )
    sent, send = Counter[str](), RankGroup.send

    def counted(world: Meeting, tensor: Tensor, target: int, tag: int) -> Any:
        if tag < TAG_LINKS:
            sent["backwards" if tag % 2 else "forwards"] += tensor.nbytes
        return send(world, tensor, target, tag)

    with patch.object(RankGroup, "send", counted):
        pipeline.step({"ids": ids, "labels": ids.roll(-1, 1)})
    row = torch.tensor([sent["forwards"], sent["backwards"]])
    forwards, backwards = world.sum(row, "the bytes of all ranks").tolist()
    kept = sum(cost.activation_bytes for cost in pipeline.measured.costs())
    figures = {"forwards": forwards, "backwards": backwards, "kept": kept}
    return figures | {"digest": pipeline.digest()}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    sizes = {name: getattr(options, name) for name in ("hidden", "blocks", "sequence")}
    figures = run_ranks("benchmarks.handed_on:sides", 2, **sizes)
    return sizes | {"rows": ROWS, "microbatches": MICROBATCHES, "head_size": HEAD_SIZE} | figures


if __name__ == "__main__":
    main(
        __doc__ or "",
        measure,
        (
            ("hidden", 512, "hidden size"),
            ("blocks", 4, "blocks of two layers"),
            ("sequence", 128, "tokens of a row"),
        ),
    )
