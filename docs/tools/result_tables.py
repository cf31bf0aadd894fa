"""The tables of the documents that the benchmarks make from their result files.

A table stands under `<!-- table: NAME -->` and an empty line. Some have fewer rows or columns than
the benchmark prints.
"""

from __future__ import annotations

from functools import cache

from benchmarks import (
    cases,
    elastic,
    exit_thresholds,
    expert_parallel,
    experts,
    learning,
    quality,
    repack,
    reshape,
    savings_experts,
    savings_tokens,
    scaling,
    sweeps,
    traces,
    traces_emulated,
    traces_stepwise,
)
from docs.tools.figures import result_of


@cache
def result_tables() -> dict[str, str]:
    """The tables in Markdown by name."""
    several = {"sweeps": sweeps.tables, "scaling": scaling.tables}
    named = {
        f"{file} {name}": text
        for file, tables in several.items()
        for name, text in tables(result_of(f"{file}.json")).items()
    }
    return named | {
        "cases": cases.table(result_of("cases.json")["rows"]),
        "cases published": _without(cases.published_table(result_of("cases.json")["rows"]), "on"),
        "quality": _without(quality.table(result_of("quality.json")), "changes at steps"),
        "learning": learning.table(result_of("learning.json")),
        "learning_experts": _without(
            learning.table(result_of("learning_experts.json")), "without exits", "evaluation"
        ),
        "savings_tokens": _without(
            savings_tokens.table(result_of("savings_tokens.json")["sizes"]), "bounded by"
        ),
        "savings_experts": _without(
            savings_experts.table(result_of("savings_experts.json")["rows"]), "time over the ideal"
        ),
        "expert_parallel": expert_parallel.table(result_of("expert_parallel.json")),
        "elastic": elastic.table(result_of("elastic.json")["rows"]),
        "experts": _without(
            experts.table(result_of("experts.json")["rows"]),
            "bound",
            "known at once",
            "experts that move",
            "half blocks that move",
        ),
        "exit_thresholds": exit_thresholds.table(result_of("exit_thresholds.json")),
        "repack": repack.table(result_of("repack.json")["rows"]),
        "reshape": reshape.table(result_of("reshape.json")["rows"]),
        "traces": _without(
            traces.summary(result_of("traces.json")["rows"]), "static", "the paper's"
        ),
        "traces stepwise": _without(
            traces_stepwise.table(result_of("traces.json")["stepwise"], ranks=(24,)),
            "ranks",
            "perfect",
            "bound",
            "published",
        ),
        "traces emulated": traces_emulated.emulated_table(result_of("traces.json")["emulated"]),
    }


def _without(table: str, *columns: str) -> str:
    """A table in Markdown without some of its columns."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    kept = [i for i, name in enumerate(rows[0]) if name not in columns]
    return "\n".join(f"| {' | '.join(row[i] for i in kept)} |" for row in rows)
