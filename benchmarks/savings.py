"""True savings of each case: seconds of F, B and W beside dense and the ideal.

Each case is measured at several intensities. The ideal is that of the arithmetic.

Joins `savings_pruning`, `savings_attention`, `savings_freezing`, `savings_tokens` (early exit and
mixture of depths) and `savings_experts`. Each runs alone too. Its docstring says what it measures
and what bounds it. One thread; medians of counted turns, sparse and dense alternating.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks import savings_freezing, savings_pruning
from benchmarks.harness import run_ranks
from benchmarks.output import add_number, parser_of, run, show


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


if __name__ == "__main__":
    parser = parser_of(__doc__, picture=savings_pruning.PICTURE, reads=True)
    add_number(parser, "sequence", 2048, "tokens of a layer's microbatch")
    add_number(parser, "rounds", 7, "counted turns of each side")
    add_number(parser, "cases", 5, "so many of the sizes of attention, tokens and experts")
    run(
        parser,
        measure,
        show,
        lambda result, path: savings_pruning.draw(result["pruning"]["crossover"], path),
    )
