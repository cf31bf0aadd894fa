"""The break-even sparsity of a pruned linear (CSR) against dense, F + B + W.

DynMo's figure 6 has 75 % on an H100 (4096 x 4096 x 4096). `crossover` is found by bisection to
1/64 (1.0: never), the median of several. `points` are sparse over dense seconds of F, B and W at
some sparsities. A run finds the same number for itself with `dynamism.pruning.dense_below =
"measured"`.
"""

from __future__ import annotations

import argparse
from statistics import median
from typing import Any

import torch

from benchmarks.gpu.device import PRECISIONS, Option, Verdict, main, progress
from benchmarks.linear_times import time_pruned
from dynmo.cases.pruning.crossover import measure_crossover

SPARSITIES = (0.5, 0.75, 0.9, 0.95, 0.99)


def matrix(
    device: torch.device,
    dtype: torch.dtype,
    rows: int,
    columns: int,
    tokens: int,
    rounds: int,
    bisections: int = 1,
) -> dict[str, Any]:
    """Measures one matrix at several sparsities."""
    progress(f"{dtype}, {rows} x {columns}")
    dense = time_pruned(rows, columns, None, tokens, rounds, device, dtype)
    points: list[dict[str, float]] = []
    for sparsity in SPARSITIES:
        sparse = time_pruned(rows, columns, sparsity, tokens, rounds, device, dtype)
        ratios = {kind: s / d for kind, s, d in zip("fbw", sparse, dense, strict=True)}
        points.append({"sparsity": sparsity, "all": sum(sparse) / sum(dense)} | ratios)
    threshold = median(
        measure_crossover(rows, columns, tokens, device, dtype) for _ in range(bisections)
    )
    return {
        "rows": rows,
        "columns": columns,
        "tokens": tokens,
        "dense_seconds": dense,
        "crossover": threshold,
        "points": points,
    }


def measure(device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """Measures all sizes in two precisions."""
    sizes = [n for n in (1024, 4096) if n <= options.largest] or [options.largest]
    return {
        name: [
            matrix(
                device, PRECISIONS[name], n, n, options.tokens, options.rounds, options.bisections
            )
            for n in sizes
        ]
        for name in ("bfloat16", "float32")
    }


def assess(result: dict[str, Any]) -> Verdict:
    crossovers = {
        f"{name} {row['rows']}": row["crossover"]
        for name in ("bfloat16", "float32")
        for row in result[name]
    }
    return Verdict(
        min(crossovers.values()) < 1,
        ", ".join(f"{name} from {share:.2f}" for name, share in crossovers.items()),
    )


OPTIONS = (
    Option("largest", 4096, 64, "rows and columns of the largest matrix"),
    Option("tokens", 4096, 32, "tokens of a microbatch"),
    Option("rounds", 3, 1, "counted turns"),
    Option("bisections", 1, 1, "how often the crossover is looked for"),
)

if __name__ == "__main__":
    main(__doc__ or "", measure, assess, OPTIONS)
