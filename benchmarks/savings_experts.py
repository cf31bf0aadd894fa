"""The savings of choosing experts in F, B and W of a feed-forward half.

The other side computes every expert for every token.

Microbatches of 512 tokens, hidden 256, one thread, in the runtime's own `Layer`. The sides take
turns; medians. Seconds are the thread's own. The dense side is one plain feed-forward half:

    all     E x dense           every expert, every token
    ideal   top_k x dense       the same products, without router and sorting

share_of_ideal = (all - ours) / (all - ideal) over F + B + W. `over_ideal` is ours / ideal: the cost
of router, sorting and small products. `lost`: `router` (scores, choice, auxiliary loss, measured
alone), `rows` (rows to their experts and back, measured alone) and `elsewhere` (small products).

Loads: `even` (the auction assigns equal numbers) and `one` (all tokens at the same experts).
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import alternate, part_medians, run_ranks
from benchmarks.output import main, markdown
from benchmarks.savings_tokens import Side, function_side, layer_side
from dynmo.cases.experts.layers import ExpertsHalf
from dynmo.models.gpt import FeedForwardHalf
from dynmo.models.options import ModelOptions
from dynmo.runtime.comm.meeting import Meeting

TOKENS, HIDDEN = 512, 256
SHAPES = ((4, 1), (4, 2), (8, 1), (8, 2), (16, 2))  # experts, top_k


def half(experts: int, top_k: int, load: str) -> ExpertsHalf:
    """Builds a half whose tokens spread evenly, or all choose the same experts."""
    torch.manual_seed(0)
    routing = "auction" if load == "even" else "bias"
    options = ModelOptions(kind="moe", hidden=HIDDEN, experts=experts, top_k=top_k, routing=routing)
    module = ExpertsHalf(options)
    if load == "one":
        module.router.bias[:top_k] = 10.0
    return module


def rows_to_experts(module: ExpertsHalf, x: Tensor) -> Side:
    """Returns a side that takes rows to their experts and back, without the experts."""
    with torch.no_grad():
        _, chosen, _, load = module.router(x)
    places, _, order = module.sort_by_expert(chosen, load)

    def move(t: Tensor) -> Tensor:
        out = t.index_select(0, places)
        return (
            t.new_zeros(chosen.numel(), t.shape[1])
            .index_copy(0, order, out)
            .view(*chosen.shape, t.shape[1])
            .sum(1)
        )

    return function_side(move, x)


def on_a_rank(world: Meeting, rounds: int, cases: int = len(SHAPES)) -> list[dict[str, Any]]:
    """Runs on the one rank."""
    return [
        shape_row(experts, top_k, load, rounds)
        for experts, top_k in SHAPES[:cases]
        for load in ("even", "one")
    ]


def shape_row(experts: int, top_k: int, load: str, rounds: int) -> dict[str, Any]:
    """Measures one shape under one load."""
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))
    module = half(experts, top_k, load)
    sides = {
        "dense": layer_side(FeedForwardHalf(ModelOptions(hidden=HIDDEN)), (x,)),
        "experts": layer_side(module, (x,)),
        "router": function_side(lambda t: module.router(t)[2], x),
        "rows": rows_to_experts(module, x),
    }
    seconds = part_medians(alternate(sides, rounds, warmup=2))
    ours, ideal = sum(seconds["experts"]), top_k * sum(seconds["dense"])
    everything = experts * sum(seconds["dense"])
    lost = {name: sum(seconds[name]) for name in ("router", "rows")}
    return {
        "experts": experts,
        "top_k": top_k,
        "load": load,
        **dict(zip("fbw", seconds["experts"], strict=True)),
        "ideal": {key: top_k * each for key, each in zip("fbw", seconds["dense"], strict=True)},
        "over_ideal": ours / ideal,
        "speedup": everything / ours,
        "share_of_ideal": (everything - ours) / (everything - ideal),
        "lost": lost | {"elsewhere": ours - ideal - sum(lost.values())},
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the table in Markdown, as docs/reference/results/layers.md shows it."""
    head = [
        "experts",
        "top_k",
        "load",
        "speed-up over all experts",
        "share of the ideal",
        "time over the ideal",
    ]
    lines: list[list[str]] = []
    for row in rows:
        numbers = (
            f"{row['speedup']:.2f}",
            f"{row['share_of_ideal']:.0%}",
            f"{row['over_ideal']:.2f}",
        )
        lines.append([str(row["experts"]), str(row["top_k"]), row["load"], *numbers])
    return markdown(head, lines, "rrlrrr")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    rows = run_ranks(
        "benchmarks.savings_experts:on_a_rank", 1, rounds=options.rounds, cases=options.cases
    )
    return {"hidden": HIDDEN, "tokens": TOKENS, "rows": rows}


if __name__ == "__main__":
    main(
        __doc__ or "",
        measure,
        [("rounds", 7, "counted turns"), ("cases", len(SHAPES), "so many of the shapes")],
    )
