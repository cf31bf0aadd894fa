"""The tables of the documents that the benchmarks make from their result files.

A table stands under `<!-- table: NAME -->` and an empty line. Most have fewer rows or columns than
the benchmark prints.
"""

from __future__ import annotations

from functools import cache

from benchmarks import (
    balanced_routing,
    batching,
    bubbles,
    cases,
    deferred,
    delays,
    delays_emulated,
    executor_families,
    exit_thresholds,
    expert_parallel,
    experts,
    heavy_head,
    host,
    joined,
    learning,
    lemmas,
    long_run,
    many_ranks,
    overhead,
    quality,
    repack_cases,
    router_loads,
    savings,
    savings_experts,
    savings_tokens,
    scaling,
    traces,
    traces_emulated,
    traces_growth,
    traces_moves,
    traces_stepwise,
    unequal,
    waiting,
    zero_bubble,
)
from benchmarks.faults.tables import tables as fault_tables
from docs.tools.figures import result_of
from docs.tools.sides import rates_table, sides_table

_STATIC = "the faster static placement of Megatron-LM and DeepSpeed, with the technique"
_NO_EXITS = "the model without exits, whose tokens all pass every layer"
_SECONDS = ("even, s", "balanced, s")


@cache
def result_tables() -> dict[str, str]:
    """The tables in Markdown by name."""
    of_traces, of_repack = result_of("traces.json"), result_of("repack.json")
    of_scaling = scaling.tables(result_of("scaling.json"))
    published = cases.published_table(result_of("cases.json")["rows"])
    return {
        "scaling weak": of_scaling["weak"],
        "scaling vertical": of_scaling["vertical"],
        "scaling emulated": _without(of_scaling["emulated"], *_SECONDS),
        "cases": _without(
            cases.table(result_of("cases.json")["rows"]),
            *("over mask", "over parameters", "ideal", "overhead"),
        ),
        "cases published": _without(published, "on")
        .replace(_STATIC, "static placement")
        .replace(_NO_EXITS, "no exits"),
        "cases overhead": cases.overhead_table(result_of("cases.json")["rows"]),
        "overhead decisions": overhead.decisions_table(result_of("overhead.json")["decisions"]),
        "overhead egeria": overhead.egeria_table(result_of("overhead.json")["egeria"]),
        "repack cases": _rows(repack_cases.case_table(of_repack["cases"]), "24"),
        "repack emulated": repack_cases.emulated_table(of_repack["emulated"]),
        "repack pipetransformer": repack_cases.pipetransformer_table(of_repack["pipetransformer"]),
        "repack ranks": _rows(repack_cases.rank_table(of_repack["cases"]), "24", "48"),
        "quality": _without(quality.table(result_of("quality.json")), "changes at steps"),
        "long_run": long_run.table(result_of("long_run.json")),
        **{
            f"many_ranks {name}": table
            for name, table in many_ranks.tables(result_of("many_ranks.json")).items()
        },
        "lemma 1": lemmas.lemma_1_table(result_of("placement.json")["lemmas"]["lemma_1"]),
        "lemma 2": lemmas.lemma_2_table(result_of("placement.json")["lemmas"]["lemma_2"]),
        "learning": _without(learning.table(result_of("learning.json")), "without exits"),
        "learning_experts": _without(
            learning.table(result_of("learning_experts.json")), "without exits", "evaluation"
        ),
        "savings": savings.table(result_of("savings.json")),
        "savings_tokens": _rows(
            _without(savings_tokens.table(result_of("savings_tokens.json")["sizes"]), "bounded by"),
            *("50.0%", "10.0%", "12.5%"),
        ),
        "savings_experts": _without(
            _rows(savings_experts.table(result_of("savings_experts.json")["rows"]), "even"),
            *("load", "time over the ideal"),
        ),
        "expert_parallel": expert_parallel.table(result_of("expert_parallel.json")),
        "experts": _without(
            _rows(experts.table(result_of("experts.json")["rows"]), "0.6"),
            *("skew", "bound", "known at once", "experts that move", "half blocks that move"),
        ),
        "experts depths": _without(
            experts.table(result_of("experts.json")["with_depths"]),
            *("skew", "bound", "perfect", "experts that move", "half blocks that move"),
        ),
        "experts recorded": _without(
            router_loads.recorded_table(result_of("router_loads.json")),
            *("bound", "experts that move", "half blocks that move"),
        ),
        "router_loads": router_loads.table(result_of("router_loads.json")),
        "balanced_routing": _without(
            balanced_routing.table(
                balanced_routing.of_512_tokens(result_of("balanced_routing.json"))
            ),
            *("tokens", "experts", "spread"),
        ),
        "deferred shares": deferred.shares_table(result_of("deferred.json")),
        "deferred times": deferred.times_table(result_of("deferred.json")),
        "delays": _rows(delays.table(result_of("delays.json")["rows"]), "1", "4"),
        "delays emulated": delays_emulated.emulated_table(result_of("delays.json")["emulated"]),
        "executor_families": executor_families.table(result_of("executor_families.json")),
        "heavy_head": heavy_head.table(result_of("heavy_head.json")),
        **{f"host {name}": table for name, table in host.tables(result_of("host.json")).items()},
        **fault_tables(result_of("faults.json")),
        "bubbles": bubbles.table(result_of("bubbles.json")["traces"]),
        "bubbles equation": bubbles.equation_table(result_of("bubbles.json")["equation"], (0.0,)),
        "batching": batching.simulated_table(result_of("batching.json")),
        "batching real": batching.real_table(result_of("batching.json")),
        "waiting": waiting.table(result_of("waiting.json")),
        **_of_zero_bubble(),
        "joined": _without(joined.table(result_of("joined.json")), "blocks", "ranks"),
        "joined emulated": joined.emulated_table(result_of("joined.json")),
        "joined small": joined.small_table(result_of("joined.json")),
        "unequal": unequal.table(result_of("unequal.json")),
        "exit_thresholds": exit_thresholds.table(result_of("exit_thresholds.json")),
        "sides": sides_table(),
        "sides rates": rates_table(),
        "traces": _without(
            _rows(traces.summary(of_traces["rows"]), "24", "32", "48"),
            *("static", "optimum", "bound", "the paper's"),
        ),
        "traces growth": traces_growth.table(of_traces["growth"]),
        "traces microbatches": traces_growth.microbatch_table(of_traces["growth"]),
        "traces stepwise": _without(
            traces_stepwise.table(of_traces["stepwise"], ranks=(24,)),
            *("ranks", "perfect", "bound", "published", "pilot"),
            *("ours / best static", "ours / optimum"),
        ),
        "traces moves": traces_moves.table(of_traces["moves"]),
        "traces emulated": _without(
            traces_emulated.emulated_table(of_traces["emulated"]), *_SECONDS, "blocks", "over dense"
        ),
    }


def _of_zero_bubble() -> dict[str, str]:
    tables = zero_bubble.tables(result_of("zero_bubble.json"))
    words = ("published", "heuristic", "zb-auto", "least")
    tables["planned"] = _without(tables["planned"], *(f"{word}, p" for word in words))
    tables["disturbed"] = _without(
        tables["disturbed"],
        *("spread 5 %", "spread 20 %", "spread 30 %", "delay 1 %", "delay 5 %", "links x3"),
        *("links x30", "with all three"),
    )
    return {f"zero_bubble {name}": table for name, table in tables.items()}


def _without(table: str, *columns: str) -> str:
    """A table in Markdown without some of its columns.

    A column "simulated" belongs to the column on its left, and leaves with it.
    """
    rows = [_cells(line) for line in table.splitlines()]
    kept: list[int] = []
    measured = ""
    for i, name in enumerate(rows[0]):
        measured = measured if name == "simulated" else name
        if measured not in columns:
            kept.append(i)
    return "\n".join(f"| {' | '.join(row[i] for i in kept)} |" for row in rows)


def _rows(table: str, *words: str) -> str:
    """The rows of a table in Markdown that have a cell with one of these words."""
    head, rule, *rows = table.splitlines()
    return "\n".join([head, rule, *(row for row in rows if set(words) & set(_cells(row)))])


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]
