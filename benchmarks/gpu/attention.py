"""Hash-sparse attention (Triton) against torch's SDPA: F, and F + B.

Only the attention itself is timed. `pairs` is the share of all causal pairs that share a bucket.
`ideal` is SDPA's seconds times `pairs`. `share_of_ideal` is the part of the possible saving that is
reached. `hashing` (drawing directions, buckets) counts. `wins_from` is the first of the lengths at
which F + B takes less than SDPA's. It is None if there is none.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.device import PRECISIONS, Option, Verdict, main, progress, turns
from dynmo.cases.sparse_attention.hashed import Hashed, draw_directions, hash_buckets
from dynmo.cases.sparse_attention.shared import dense_attention

BUCKETS = (16, 64)


def forward(attend: Callable[[Tensor, Tensor], Tensor], x: Tensor, v: Tensor) -> Callable[[], None]:
    """Returns a side that runs F alone."""

    def run() -> None:
        with torch.no_grad():
            attend(x, v)

    return run


def both(
    attend: Callable[[Tensor, Tensor], Tensor], x: Tensor, v: Tensor, g: Tensor
) -> Callable[[], None]:
    """Returns a side that runs F and B."""

    def run() -> None:
        a, b = x.detach().requires_grad_(), v.detach().requires_grad_()
        attend(a, b).backward(g)

    return run


def share_of_pairs(x: Tensor, hashed: Hashed) -> float:
    """Returns the share of all pairs (query, earlier key) that are in one bucket."""
    buckets = hash_buckets(
        x, draw_directions(x.shape[2], x.shape[3], hashed.buckets, hashed.seed, x.device)
    )
    batch, sequence, heads = buckets.shape
    counts = torch.nn.functional.one_hot(buckets, hashed.buckets).sum(1).double()
    return float((counts * (counts - 1)).sum() / (batch * heads * sequence * (sequence - 1)))


def length(
    device: torch.device,
    dtype: torch.dtype,
    sequence: int,
    *,
    heads: int,
    size: int,
    batch: int,
    rounds: int,
) -> dict[str, Any]:
    """Measures the attention at one length, against dense attention."""
    progress(f"{dtype}, {sequence} tokens")
    generator = torch.Generator().manual_seed(0)
    x, v, g = (
        torch.randn(batch, sequence, heads, size, generator=generator).to(device, dtype)
        for _ in range(3)
    )
    kinds = {f"hash, {n} buckets": Hashed(n, 32, 1) for n in BUCKETS if n <= sequence}
    sides: dict[str, Callable[[], object]] = {}
    for name, attend in {"sdpa": dense_attention, **kinds}.items():
        sides[f"{name}: f"], sides[f"{name}: f+b"] = forward(attend, x, v), both(attend, x, v, g)
    seconds = turns(device, sides, rounds)
    dense = seconds["sdpa: f+b"]
    out: dict[str, Any] = {"sequence": sequence, "seconds": seconds, "kinds": {}}
    for name, hashed in kinds.items():
        pairs, mine = share_of_pairs(x, hashed), seconds[f"{name}: f+b"]
        out["kinds"][name] = {
            "pairs": pairs,
            "speedup": dense / mine,
            "share_of_ideal": (dense - mine) / (dense * (1 - pairs)),
        }
    return out


def wins_from(rows: Sequence[dict[str, Any]]) -> dict[str, int | None]:
    return {
        f"hash, {n} buckets": next(
            (
                r["sequence"]
                for r in rows
                if r["kinds"].get(f"hash, {n} buckets", {}).get("speedup", 0) > 1
            ),
            None,
        )
        for n in BUCKETS
    }


def measure(device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """Measures all lengths in two precisions."""
    shape = {key: getattr(options, key) for key in ("heads", "size", "batch", "rounds")}
    lengths = [2**i for i in range(10, 16) if 2**i <= options.longest] or [options.longest]
    measured = {
        name: [length(device, PRECISIONS[name], n, **shape) for n in lengths]
        for name in ("bfloat16", "float32")
    }
    return {
        **shape,
        "lengths": measured,
        "wins_from": {name: wins_from(rows) for name, rows in measured.items()},
    }


def assess(result: dict[str, Any]) -> Verdict:
    starts = {
        f"{name} {kind}": first
        for name, kinds in result["wins_from"].items()
        for kind, first in kinds.items()
    }
    told = ", ".join(
        f"{name} {'never' if first is None else f'from {first}'}" for name, first in starts.items()
    )
    return Verdict(
        any(first is not None for name, first in starts.items() if name.startswith("bfloat16")),
        told,
    )


OPTIONS = (
    Option("heads", 16, 2, "heads"),
    Option("size", 64, 16, "width of a head"),
    Option("batch", 2, 1, "sequences"),
    Option("longest", 16384, 64, "longest sequence, from 1024 on by doubling, at most 32768"),
    Option("rounds", 5, 1, "counted turns"),
)

if __name__ == "__main__":
    main(__doc__ or "", measure, assess, OPTIONS)
