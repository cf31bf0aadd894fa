"""Seconds of F, B and W of one linear, plain or pruned."""

from __future__ import annotations

import time
from statistics import median
from typing import Any, cast

import torch
from torch import nn

from dynmo.cases.pruning.crossover import make_pruned
from dynmo.kernels.deferral import install
from dynmo.kernels.split import WeightTape


def time_pruned(
    rows: int,
    columns: int,
    sparsity: float | None,
    tokens: int,
    repeats: int = 5,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[float, float, float]:
    """Returns the median seconds for a linear pruned at random places. None: a plain one."""
    return time_linear(make_pruned(rows, columns, sparsity, device, dtype), tokens, repeats)


def time_linear(linear: nn.Linear, tokens: int, repeats: int = 5) -> tuple[float, float, float]:
    """Returns the median seconds of F, B and W on one microbatch. Clears the gradient."""
    device = linear.weight.device
    x, gy = (
        torch.randn(tokens, width).to(device, linear.weight.dtype)
        for width in (linear.in_features, linear.out_features)
    )
    tape = WeightTape()
    tape.deferred = True
    install(linear, tape)

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    rows: list[tuple[float, float, float]] = []
    for _ in range(repeats + 1):
        leaf = x.requires_grad_()
        marks = [now()]
        y = linear(leaf)
        marks.append(now())
        y.backward(gy)
        marks.append(now())
        for work, _ in tape.take():
            work()
        marks.append(now())
        rows.append((marks[1] - marks[0], marks[2] - marks[1], marks[3] - marks[2]))
        leaf.grad = None
    cast(Any, linear.weight).grad = None
    f, b, w = zip(*rows[1:], strict=True)
    return median(f), median(b), median(w)
