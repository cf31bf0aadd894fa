"""True savings of each case: seconds of F, B and W beside dense and the ideal.

Each case is measured at several intensities. The ideal is that of the arithmetic.

Joins `savings_pruning`, `savings_attention`, `savings_freezing`, `savings_tokens` (early exit and
mixture of depths) and `savings_experts`. Each runs alone too. Its docstring says what it measures
and what bounds it. One thread; medians of counted turns, sparse and dense alternating.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from benchmarks import savings_freezing, savings_pruning
from benchmarks.harness import run_ranks
from benchmarks.output import add_number, markdown, parser_of, run, show

SHOWN = (0.52, 0.79, 0.9)  # sparsities
LOSSES = {
    "kernel": "speed of the sparse kernels",
    "padding": "padding to whole tiles",
    "rate": "small tiles",
    "around": "sorting",
    "elsewhere": "elsewhere",
}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    sequence, rounds = options.sequence, options.rounds
    given = {"rounds": rounds, "cases": options.cases}
    return {
        "pruning": run_ranks(
            "benchmarks.savings_pruning:on_a_rank", 1, sequence=sequence, rounds=rounds, tokens=512
        ),
        "sparse_attention": run_ranks("benchmarks.savings_attention:on_a_rank", 1, **given),
        "freezing": savings_freezing.measure(sequence, rounds),
        "tokens": run_ranks("benchmarks.savings_tokens:on_a_rank", 1, **given),
        "experts": run_ranks("benchmarks.savings_experts:on_a_rank", 1, **given),
    }


def table(result: dict[str, Any]) -> str:
    """Returns the speed-ups of half blocks in Markdown."""
    rows = [
        [f"pruning, {x['sparsity']:.0%}", *_half(x), _loss([x])]
        for x in result["pruning"]["layers"]
        if x["sparsity"] in SHOWN
    ]
    below = {"prefix": "nothing below trains", "above": "layers below train"}
    rows += [
        [f"frozen, {below[x['frozen']]}", *_half(x), "-"]
        for x in result["freezing"]["layers"]
        if "frozen" in x
    ]
    for x in result["sparse_attention"]:
        kinds = list(x["kinds"].values())
        gains = [
            sum(x["dense"][op] / sum(kind[op] for op in "fbw") for op in "fbw") for kind in kinds
        ]
        shares = [kind["share_of_ideal"]["f+b"] for kind in kinds]
        rows.append(
            [
                f"sparse attention, {x['sequence']:,} tokens",
                "attention",
                f"{min(gains):.2f} to {max(gains):.2f}",
                f"{min(shares):.0%} to {max(shares):.0%}",
                _loss(kinds),
            ]
        )
    head = ["technique", "half", "speed-up of F + B + W", "share of the ideal", "largest loss"]
    return markdown(head, rows, "llrrl")


def _half(x: dict[str, Any]) -> list[str]:
    return [x["layer"].replace("_", "-"), f"{x['speedup']:.2f}", f"{x['share_of_ideal']:.0%}"]


def _loss(parts: Sequence[dict[str, Any]]) -> str:
    """Returns what loses the most of the ideal, where over 15 % of it are lost."""
    names = {x["bounded_by"]: None for x in parts if x["bounded_by"]}
    return ", ".join(LOSSES[name] for name in names) or "-"


def draw(result: dict[str, Any]) -> dict[str, Any]:
    """Draws what sparse kernels save."""
    return savings_pruning.draw(result["pruning"])


if __name__ == "__main__":
    parser = parser_of(__doc__, draws=True, reads=True)
    add_number(parser, "sequence", 2048, "tokens of a layer's microbatch")
    add_number(parser, "rounds", 7, "counted turns of each side")
    add_number(parser, "cases", 5, "so many of the sizes of attention, tokens and experts")
    run(
        parser,
        measure,
        show,
        draw,
    )
