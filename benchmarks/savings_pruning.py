"""The savings of gradual pruning in F, B and W, and the break-even sparsity.

Layers: both halves of a GPT block at DynMo's width (hidden 1024, 32 heads, sequence 2048). One
microbatch of one sequence, one thread, in the runtime's own `Layer`. The sides take turns; medians.
The ideal is the count of products at the dense layer's own speed:

    F  2P + A -> 2P (1-s) + A        B  2P + 2A -> 2P (1-s) + 2A        W  2P -> 2P (1-s)

The linears' dense time is measured, and A's is the rest.
share_of_ideal = (dense - pruned) / (dense - ideal).

`lost` is the seconds of F + B + W over the ideal, by parts measured alone:

    kernel      the sparse kernels, over their share of the dense linears' time: they do fewer
                products a second
    packing     tokens to panels and back, values to their transposed order
    elsewhere   the rest: autograd, allocation, caches

`bounded_by` names the largest part where the share is under 85 %.

`crossover` gives the sparse over the dense time of F + B + W of one matrix at each sparsity. The
break-even sparsity is found by a bisection apart from them. `--plot` draws it beside what
`make gpu` measured. DynMo's figure 6 has 75 % on an H100 (4096 x 4096 x 4096).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from benchmarks.harness import alternate, bound_of, elapsed, part_medians, run_ranks, time_layer
from benchmarks.linear_times import time_linear, time_pruned
from benchmarks.output import (
    WIDTH,
    add_number,
    legend_above,
    parser_of,
    pyplot,
    run,
    show,
)
from dynmo.cases.pruning.crossover import make_pruned, measure_crossover
from dynmo.cases.pruning.csr import pack, sddmm_, spmm, unpack
from dynmo.cases.pruning.sparse_linear import SparseLinear, linears, prune, survivors
from dynmo.config import parse
from dynmo.runtime.comm.clock import clock_for
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.layer.layer import Layer
from dynmo.train.setup import model_of

ON_A_GPU = Path(__file__).parent / "results" / "gpu" / "sparse.json"
PAPER_CROSSOVER = 0.75
PAPER = (0.52, 0.79, 0.89, 0.90)  # after each prune of the published schedule
MATRICES = ((1024, 1024), (256, 1024))
CURVE = (0.3, 0.4, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.99)

Seconds = tuple[float, float, float]


def half(which: int, hidden: int, heads: int, sequence: int) -> nn.Module:
    """Builds the attention (0) or the feed-forward (1) half of a block."""
    config = parse({"model": {"blocks": 1, "hidden": hidden, "heads": heads, "sequence": sequence}})
    return model_of(config).build([1 + which])[1 + which]


def pruned_half(which: int, hidden: int, heads: int, sequence: int, sparsity: float) -> nn.Module:
    """Builds a half whose linears are pruned by magnitude, in sparse form."""
    module = half(which, hidden, heads, sequence)
    for _, linear in list(linears(module)):
        weights = survivors(linear)
        keep = torch.zeros(len(weights), dtype=torch.bool)
        keep[weights.abs().topk(round(len(weights) * (1 - sparsity))).indices] = True
        prune(linear, keep, True, {})
    return module


def in_turn(layers: Sequence[Layer], x: torch.Tensor, rounds: int) -> list[list[float]]:
    """Returns medians of each layer's F, B and W."""
    gy = torch.randn_like(x)

    def once(layer: Layer) -> Seconds:
        seconds = time_layer(layer, (x.requires_grad_(),), (gy,))
        layer.module.zero_grad()
        return seconds

    # In the round of warm-up a layer measures its sizes.
    sides = {str(place): partial(once, layer) for place, layer in enumerate(layers)}
    return list(part_medians(alternate(sides, rounds, warmup=1)).values())


def linear_seconds(module: nn.Module, tokens: int, rounds: int) -> Seconds:
    """Times a dense module's linears alone."""
    each = [
        time_pruned(x.out_features, x.in_features, None, tokens, rounds) for _, x in linears(module)
    ]
    f, b, w = (sum(x) for x in zip(*each, strict=True))
    return f, b, w


def sparse_seconds(module: nn.Module, tokens: int, rounds: int) -> dict[str, float]:
    """Times a pruned module's sparse linears in one microbatch."""
    seconds = {"kernel": 0.0, "packing": 0.0}

    def add(key: str, run: Callable[[], object], times: int = 1) -> None:
        _, *taken = (elapsed(run) for _ in range(rounds + 1))
        seconds[key] += times * median(taken)

    for linear in (x for _, x in linears(module) if isinstance(x, SparseLinear)):
        csr, (flipped, order), values = linear.csr, linear.flipped, linear.weight.detach()[0]
        x, gy = torch.randn(tokens, linear.in_features), torch.randn(tokens, linear.out_features)
        columns, rows, gradient = pack(x), pack(gy), torch.zeros_like(values)
        turned = values.index_select(0, order)
        add("kernel", lambda csr=csr, v=values, c=columns: spmm(csr, v, c))
        add("kernel", lambda csr=flipped, v=turned, r=rows: spmm(csr, v, r))
        add("kernel", lambda csr=csr, r=rows, c=columns, g=gradient: sddmm_(csr, r, c, g))
        for matrix in (x, gy):  # there in F and B, and each back once
            packed = pack(matrix)
            add("packing", lambda m=matrix: pack(m))
            add("packing", lambda p=packed, m=matrix: unpack(p, m.shape))
        add("packing", lambda v=values, o=order: v.index_select(0, o))
    return seconds


def layers(
    hidden: int, heads: int, sequence: int, sparsities: Sequence[float], rounds: int
) -> list[dict[str, Any]]:
    """Measures a row for each half and sparsity."""
    out: list[dict[str, Any]] = []
    clock = clock_for(torch.device("cpu"))
    x = torch.randn(1, sequence, hidden)
    for which, name in enumerate(("attention", "feed_forward")):
        dense = half(which, hidden, heads, sequence)
        matmuls = linear_seconds(dense, sequence, rounds)
        modules = [dense, *(pruned_half(which, hidden, heads, sequence, s) for s in sparsities)]
        before, *after = in_turn([Layer(0, module, clock, 0) for module in modules], x, rounds)
        for sparsity, now, module in zip(sparsities, after, modules[1:], strict=True):
            ideal = [
                whole - sparsity * min(part, whole)
                for whole, part in zip(before, matmuls, strict=True)
            ]
            share = (sum(before) - sum(now)) / (sum(before) - sum(ideal))
            parts = sparse_seconds(module, sequence, rounds)
            if parts["kernel"]:
                parts["kernel"] -= (1 - sparsity) * sum(matmuls)
                lost = parts | {"elsewhere": sum(now) - sum(ideal) - sum(parts.values())}
            else:
                lost = {"dense under a mask": sum(now) - sum(ideal)}
            out.append(
                {
                    "layer": name,
                    "sparsity": sparsity,
                    "dense": dict(zip("fbw", before, strict=True)),
                    "pruned": dict(zip("fbw", now, strict=True)),
                    "ideal": dict(zip("fbw", ideal, strict=True)),
                    "speedup": sum(before) / sum(now),
                    "ideal_speedup": sum(before) / sum(ideal),
                    "share_of_ideal": share,
                    "share_of_ideal_each": {
                        kind: (a - b) / (a - c)
                        for kind, a, b, c in zip("fbw", before, now, ideal, strict=True)
                    },
                    **bound_of(share, lost),
                }
            )
    return out


def curves(tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Measures sparse over dense time of each matrix at each sparsity.

    F, B and W are measured each.

    The crossover is found by bisection.
    """
    out: list[dict[str, Any]] = []
    for rows, columns in MATRICES:
        points: list[dict[str, float]] = []
        plain = make_pruned(rows, columns, None)
        for sparsity in CURVE:
            linear = make_pruned(rows, columns, sparsity)
            pairs = [
                (time_linear(plain, tokens, 1), time_linear(linear, tokens, 1))
                for _ in range(rounds)
            ]
            dense, sparse = (
                [median(x) for x in zip(*side, strict=True)] for side in zip(*pairs, strict=True)
            )
            ratios = {kind: b / a for kind, a, b in zip("fbw", dense, sparse, strict=True)}
            points.append({"sparsity": sparsity, "all": sum(sparse) / sum(dense)} | ratios)
        measured = median(measure_crossover(rows, columns, tokens) for _ in range(3))
        out.append(
            {
                "rows": rows,
                "columns": columns,
                "tokens": tokens,
                "crossover": measured,
                "points": points,
            }
        )
    return out


def on_a_rank(world: Meeting, sequence: int, rounds: int, tokens: int) -> dict[str, Any]:
    """Runs on one rank as dynmo starts it, with the allocator set as it is there."""
    torch.manual_seed(0)
    return {
        "layers": layers(1024, 32, sequence, PAPER, rounds),
        "crossover": curves(tokens, rounds),
        "paper_crossover": PAPER_CROSSOVER,
    }


def draw(result: dict[str, Any]) -> dict[str, Any]:
    """Draws figure 6: the time of the sparse kernels over dense ones."""
    figure, axes = pyplot().subplots(figsize=(WIDTH, 4.8))
    on_cpu = (("-o", "#0072b2"), ("-s", "#d55e00"))
    curves = [
        (one, f"CPU, {one['rows']} x {one['columns']}", *look)
        for one, look in zip(result["crossover"], on_cpu, strict=True)
    ]
    on_gpu: dict[str, Any] = json.loads(ON_A_GPU.read_text())["result"]
    curves += [
        (on_gpu[dtype][-1], f"H100, {on_gpu[dtype][-1]['rows']} squared, {dtype}", *look)
        for dtype, look in (("float32", ("--^", "#009e73")), ("bfloat16", ("--v", "#cc79a7")))
    ]
    for one, name, style, colour in curves:
        pays = "never pays" if one["crossover"] == 1 else f"pays from {one['crossover']:.0%}"
        x = [100 * point["sparsity"] for point in one["points"]]
        y = [point["all"] for point in one["points"]]
        axes.plot(x, y, style, color=colour, label=f"{name}: {pays}")
    text = f"the paper, H100, 4096 squared: {PAPER_CROSSOVER:.0%}"
    axes.axvline(100 * PAPER_CROSSOVER, color="0.4", linestyle="-.", linewidth=1, label=text)
    axes.plot(
        [100 * s for s in CURVE],
        [1 - s for s in CURVE],
        ":",
        color="0.4",
        label="ideal: 1 - sparsity",
    )
    axes.axhline(1, color="0.4", linewidth=1)
    axes.set_yscale("log")
    axes.set_yticks(
        ticks := [0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20], [f"{tick:g}" for tick in ticks]
    )
    axes.minorticks_off()
    axes.set_xlabel("sparsity, %")
    axes.set_ylabel("time of F + B + W, sparse / dense")
    legend_above(figure, 2)
    return {"sparse_crossover": figure}


if __name__ == "__main__":
    parser = parser_of(__doc__, draws=True, reads=True)
    add_number(parser, "sequence", 2048, "tokens of the layer's microbatch")
    add_number(parser, "rounds", 7, "counted turns of each side")
    add_number(parser, "tokens", 512, "tokens for the crossover")

    def measure(options: argparse.Namespace) -> dict[str, Any]:
        sizes = {"sequence": options.sequence, "rounds": options.rounds, "tokens": options.tokens}
        return run_ranks("benchmarks.savings_pruning:on_a_rank", 1, **sizes)

    run(parser, measure, show, draw)
