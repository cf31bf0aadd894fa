"""`python -m dynmo.kernels.prepare` compiles the loops of this folder and keeps the machine code: at set-up, so that no step of a first run
waits for it, on all its ranks at once."""

from __future__ import annotations

import torch

from dynmo.kernels.drop_attention import Dropped
from dynmo.kernels.hash_attention import Hashed
from dynmo.kernels.sparse_linear import make_pruned, seconds


def prepare() -> None:
    torch.set_num_threads(1)
    seconds(make_pruned(8, 8, 0.5, sparse=True), tokens=4, repeats=1)
    x, v = (torch.randn(2, 8, 2, 4, requires_grad=True) for _ in range(2))
    for attention in (Hashed(2, 4, seed=0), Dropped(0.5, 4, seed=0)):
        attention(x, v).sum().backward()


if __name__ == "__main__":
    prepare()
