"""The savings of sparse attention in F, B and W of an attention half.

They are measured at several lengths, against dense attention (torch's SDPA).

Layer: `SharedAttentionHalf`, hidden 256, 4 heads, microbatches of 2, one thread, in the runtime's
own `Layer` and a rank's environment. The sides take turns; medians. Seconds are the thread's own,
so that what else runs on the machine counts little.

`pairs` is the share of all pairs that sparse attention keeps. The ideal saves the rest of the
attention's own seconds, which are measured alone:

    ideal = dense - attention (1 - pairs)        share_of_ideal = (dense - sparse) / (dense - ideal)

Three figures bound it:

    computed    pairs the tiles compute, over all: padding to the longest bucket of a batch, and
                what the mask hides in the last tile
    rate        computed pairs per second in small tiles, over those of dense attention
    around      seconds of hashing, sorting, gathering and spreading, and the keys' lengths

`lost` is the seconds of F + B over the ideal, by where:

    around      as above
    padding     pairs computed in vain, at dense attention's speed
    rate        the computed pairs' seconds over those at dense attention's speed
    elsewhere   the rest; all of it, for `drop`

`bounded_by` names the largest where the share of the ideal is under 85 %.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.harness import alternate, bound_of, part_medians, run_ranks, time_layer
from benchmarks.output import main
from dynmo.cases.sparse_attention import hashed as kernel
from dynmo.cases.sparse_attention.dropped import Dropped, draw_kept, plan_kept
from dynmo.cases.sparse_attention.hashed import Hashed, hash_buckets, plan_buckets
from dynmo.cases.sparse_attention.layers import SharedAttentionHalf
from dynmo.cases.sparse_attention.shared import (
    SparseAttention,
    dense_attention,
    rows_of,
    scale_keys,
)
from dynmo.models.gpt import AttentionHalf
from dynmo.models.options import ModelOptions
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.layer.layer import Layer

HIDDEN, HEADS, BATCH = 256, 4, 2
SEQUENCES = (512, 1024, 2048, 4096)
KINDS: dict[str, tuple[SparseAttention, int]] = {
    "hash, 4 buckets": (Hashed(4, 32, 1), 4),
    "hash, 16 buckets": (Hashed(16, 32, 1), 16),
    "hash, 64 buckets": (Hashed(64, 32, 1), 64),
    "drop, half": (Dropped(0.5, 64, 1), 0),
}

Seconds = tuple[float, float, float]


class ThreadClock:
    """A clock of the seconds that this thread has computed."""

    mark = staticmethod(time.thread_time)

    @staticmethod
    def seconds(start: float, end: float) -> float:
        return end - start

    elapsed = seconds

    def settle(self) -> None:
        pass


def half(sequence: int, sparse: SparseAttention | None, shared: bool = True) -> AttentionHalf:
    """Builds an attention half."""
    torch.manual_seed(0)
    options = ModelOptions(hidden=HIDDEN, heads=HEADS, sequence=sequence)
    module = (SharedAttentionHalf if shared else AttentionHalf)(options)
    if isinstance(module, SharedAttentionHalf):
        module.sparse_attention = sparse
    return module


def once(layer: Layer, x: Tensor, gy: Tensor) -> Seconds:
    """Times F, B and W of a layer for one microbatch."""
    layer.module.zero_grad()
    return time_layer(layer, (x.requires_grad_(),), (gy,))


def alone(attend: Callable[[Tensor, Tensor], Tensor], x: Tensor, v: Tensor, g: Tensor) -> Seconds:
    """Times F and B of the attention without its projections."""
    x, v = x.detach().requires_grad_(), v.detach().requires_grad_()
    start = time.thread_time()
    out = attend(x, v)
    middle = time.thread_time()
    out.backward(g)
    return middle - start, time.thread_time() - middle, 0.0


def around(x: Tensor, v: Tensor, hashed: Hashed) -> Seconds:
    """Times what the kernel does besides its tiles.

    F: hashing, planning, gathering, the keys' lengths, spreading. B: gathering and spreading.
    """
    start = time.thread_time()
    directions = kernel.draw_directions(HEADS, x.shape[3], hashed.buckets, hashed.seed)
    plan = plan_buckets(hash_buckets(x, directions), hashed.buckets)
    q, values = (rows_of(t).index_select(0, plan.rows) for t in (x, v))
    k, factors = scale_keys(q, 0.125)
    values.index_select(0, plan.places)
    middle = time.thread_time()
    rows_v = rows_of(v)
    for chunk in plan.chunks:
        rows_v.index_select(0, plan.rows[chunk.places])
    gx, keys = x.new_empty(plan.places.shape[0], x.shape[3]), k.numpy()
    kernel._spread_x(
        q.numpy(),
        keys,
        keys,
        factors.numpy(),
        keys.dtype.type(64.0),
        plan.places.numpy(),
        gx.numpy(),
    )
    values.index_select(0, plan.places)
    return middle - start, time.thread_time() - middle, 0.0


def inner(module: AttentionHalf, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the half's inputs of its attention: rotated vectors and values."""
    handed: list[tuple[Tensor, Tensor]] = []

    def listen(both: Tensor, v: Tensor) -> Tensor:
        handed.append((both.detach(), v.detach()))
        return v

    assert isinstance(module, SharedAttentionHalf)
    before, module.sparse_attention = module.sparse_attention, listen
    with torch.no_grad():
        module(x)
    module.sparse_attention = before
    return handed[0]


def length(sequence: int, rounds: int) -> dict[str, Any]:
    """Measures all kinds at one length, against dense."""
    clock = ThreadClock()
    x = torch.randn(BATCH, sequence, HIDDEN, generator=torch.Generator().manual_seed(0))
    gy = torch.randn_like(x)
    dense = half(sequence, None)
    both, v = inner(dense, x)
    g = torch.randn_like(both)
    sides: dict[str, Callable[[], Seconds]] = {}
    for name, module in (
        ("dense", dense),
        ("separate keys", half(sequence, None, shared=False)),
        *((name, half(sequence, kind)) for name, (kind, _) in KINDS.items()),
    ):
        layer = Layer(0, module, clock, 0)
        sides[name] = lambda layer=layer: once(layer, x, gy)
    sides["attention alone"] = lambda: alone(dense_attention, both, v, g)
    for name, (kind, _) in KINDS.items():
        sides[f"{name}: alone"] = lambda kind=kind: alone(kind, both, v, g)
        if isinstance(kind, Hashed):
            sides[f"{name}: around"] = lambda kind=kind: around(both, v, kind)
    medians = part_medians(alternate(sides, rounds, warmup=2))
    return {
        "sequence": sequence,
        "dense": _fbw(medians["dense"]),
        "separate_keys": _fbw(medians["separate keys"]),
        "attention_alone": _fbw(medians["attention alone"]),
        "kinds": {name: _compare(medians, name, kind, both) for name, (kind, _) in KINDS.items()},
    }


def _pairs(kind: SparseAttention, both: Tensor) -> tuple[int, int]:
    """Returns the pairs that attend, and those that the tiles compute."""
    batch, sequence, heads, size = both.shape
    if isinstance(kind, Hashed):
        directions = kernel.draw_directions(heads, size, kind.buckets, kind.seed)
        chosen = hash_buckets(both, directions)
        lengths = functional.one_hot(chosen, kind.buckets).sum(1)
        chunks = plan_buckets(chosen, kind.buckets).chunks
        tiles = [
            (chunk.buckets, each)
            for chunk in chunks
            for each in kernel.staircase(chunk.length - 1, kind.tile, both.dtype)
        ]
        pairs = int((lengths * (lengths - 1) // 2).sum())
    else:
        assert isinstance(kind, Dropped)
        queries, keys = draw_kept(heads, sequence, kind.share, kind.seed)
        plan = plan_kept(batch, sequence, queries, keys, kind.tile, both.dtype)
        tiles = [(batch * heads, each) for each in plan.tiles]
        pairs = batch * int(torch.searchsorted(keys, queries).sum())
    return pairs, sum(times * (each.stop - each.start) * each.end for times, each in tiles)


def _compare(
    medians: dict[str, list[float]], name: str, kind: SparseAttention, both: Tensor
) -> dict[str, Any]:
    batch, sequence, heads, _ = both.shape
    pairs, computed = _pairs(kind, both)
    every = batch * heads * sequence * (sequence - 1) // 2
    dense = medians["dense"]
    sparse = medians[name]
    attention = medians["attention alone"]
    apart = medians[f"{name}: alone"]
    ideal = [d - a * (1 - pairs / every) for d, a in zip(dense, attention, strict=True)]
    whole = (sum(dense[:2]) - sum(sparse[:2])) / (sum(dense[:2]) - sum(ideal[:2]))
    result: dict[str, Any] = {
        **_fbw(sparse),
        "ideal": _fbw(ideal),
        "pairs": pairs / every,
        "computed": computed / every,
        "speedup": _fbw([d / s for d, s in zip(dense, sparse, strict=True)]),
        "share_of_ideal": {
            key: (d - s) / (d - i) for key, d, s, i in zip("fb", dense, sparse, ideal, strict=False)
        }
        | {"f+b": whole},
    }
    over, lost = sum(sparse[:2]) - sum(ideal[:2]), dict[str, float]()
    if isinstance(kind, Hashed):
        rest = medians[f"{name}: around"]
        part = computed / every
        lost["around"] = sum(rest[:2])
        lost["padding"] = (computed - pairs) / every * sum(attention[:2])
        lost["rate"] = sum(apart[:2]) - lost["around"] - part * sum(attention[:2])
        result["around"] = dict(zip("fb", rest, strict=False))
        result["rate"] = {
            key: part * a / (s - r)
            for key, a, s, r in zip("fb", attention, apart, rest, strict=False)
        }
    return result | bound_of(whole, lost | {"elsewhere": over - sum(lost.values())})


def _fbw(seconds: list[float]) -> dict[str, float]:
    return dict(zip("fbw", seconds, strict=True))


def on_a_rank(world: Meeting, rounds: int, cases: int = len(SEQUENCES)) -> list[dict[str, Any]]:
    """Runs on the one rank."""
    return [length(sequence, rounds) for sequence in SEQUENCES[:cases]]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    rows = run_ranks(
        "benchmarks.savings_attention:on_a_rank", 1, rounds=options.rounds, cases=options.cases
    )
    return {"hidden": HIDDEN, "heads": HEADS, "microbatch": BATCH, "lengths": rows}


if __name__ == "__main__":
    main(
        __doc__ or "",
        measure,
        [("rounds", 7, "counted turns"), ("cases", len(SEQUENCES), "so many of the lengths")],
    )
