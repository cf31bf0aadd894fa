"""Scaling, static against balanced, beside the paper's figure 8 and table 1.

It is measured in the simulator and on emulated ranks.

weak          the fixed trace of pruning (figure 8's case), two blocks a rank: 12 to 24 ranks x 30
              replicas, up to 720. Throughput in microbatches per unit of time (a block's F), mean
              over the moments. Replicas multiply it, reductions are not counted.
              `speed_up`: balanced over static; `efficiency`: throughput a rank over the smallest
              size's. Published: up to 2.12x
vertical      hash-sparse attention, table 1: so many blocks on 2, 4, 8 ranks, four times as many
              microbatches as ranks. static: whole blocks, evenly; balanced: halves by `exact`,
              moment by moment. The published speed-ups are the best balancer's over Megatron-LM.
              Samples per second have one factor, which makes `static` the paper's Megatron-LM at
              24 blocks on 2 ranks; `seconds_of_unit` are those of a block's dense F by this
              factor. `memory` is the fullest rank's by dynmo's account of the
              paper's model (`benchmarks.paper_model`), with flash attention and with attention
              matrices that stay until B. `vertical_oom` are the cells that ran out of memory in
              the paper
equal_memory  ZB-2p against 1F1B and ZB-1p in the same memory and batch: they get half as many
              microbatches of twice the size. Costs of Zero Bubble's table 5. Twice the size is
              taken to cost twice the time, which is kinder to ZB-2p than a GPU that does better on
              more. The paper's 14 % over 1F1B (table 11) are for as many microbatches of twice the
              size, and so for twice the batch
emulated      the moment 18 of the same traces on real processes whose layers sleep: see
              `benchmarks.traces_emulated`

Static and balanced are mean simulated makespans of ZB-H1. Decisions are free and know each moment's
costs.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from statistics import mean
from typing import Any

from benchmarks import paper_model
from benchmarks.cost_traces import best, in_blocks, perfect, timeline, trace
from benchmarks.harness import run_ranks
from benchmarks.output import (
    WIDTH,
    add_number,
    bars,
    markdown,
    parser_of,
    pyplot,
    run,
)
from benchmarks.published import table_5
from benchmarks.traces_emulated import emulated_table
from dynmo.cost.layer_cost import Costs, StageCost, uniform_costs
from dynmo.plan.bisection import exact
from dynmo.plan.partition import uniform
from dynmo.schedule.automatic.zero_bubble import automatic
from dynmo.schedule.catalogue import make
from dynmo.schedule.simulator import simulate

REPLICAS = 30
WEAK = ((24, 12), (32, 16), (40, 20), (48, 24))  # blocks, ranks
PUBLISHED_WEAK = 2.12
# Table 1: samples per second, Megatron-LM / diffusion by time / partition by time.
VERTICAL = {
    (24, 2): (10.67, 12.38, 12.88),
    (24, 4): (20.23, 24.86, 24.82),
    (24, 8): (37.253, 46.939, 45.071),
    (32, 2): (8.28, 10.35, 10.12),
    (32, 4): (15.69, 19.06, 19.76),
    (32, 8): (30.809, 39.899, 37.933),
    (40, 2): (7.14, 8.84, 9.13),
    (40, 4): (12.84, 16.11, 16.82),
    (40, 8): (26.425, 35.262, 33.296),
    (48, 4): (10.89, 14.7, 14.54),
    (48, 8): (23.126, 31.724, 29.711),
    (56, 8): (19.126, 26.724, 25.711),
}
VERTICAL_OOM = ((48, 2), (56, 2), (56, 4))
FITTED = (24, 2)  # the cell that gives the factor of samples per second


def weak(stride: int) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for blocks, ranks in WEAK:
        microbatches, moments = 2 * ranks, trace("pruning", blocks, 2048)[::stride]
        even = uniform(blocks, ranks)
        static = mean(
            microbatches / timeline(in_blocks(x), even, microbatches).makespan for x in moments
        )
        balanced = mean(
            microbatches / timeline(x, best(x, ranks, microbatches), microbatches).makespan
            for x in moments
        )
        ideal = mean(microbatches / perfect(x, ranks, microbatches).makespan for x in moments)
        rates = {
            "static": static * REPLICAS,
            "balanced": balanced * REPLICAS,
            "perfect": ideal * REPLICAS,
        }
        base = out[0] if out else None
        size = ranks * REPLICAS
        out.append(
            {
                "blocks": blocks,
                "pipeline": ranks,
                "replicas": REPLICAS,
                "ranks": size,
                # A deeper model has more work in a microbatch: throughput in blocks.
                "throughput": {name: rate * blocks for name, rate in rates.items()},
                "speed_up": balanced / static,
                "bound": ideal / static,
                "efficiency": {
                    name: 1.0
                    if base is None
                    else rate * blocks / size / (base["throughput"][name] / base["ranks"])
                    for name, rate in rates.items()
                },
            }
        )
    return out


def vertical(stride: int) -> dict[str, Any]:
    """Measures all cells of table 1."""
    rows = {cell: _cell(*cell, stride) for cell in (*VERTICAL, *VERTICAL_OOM)}
    factor = VERTICAL[FITTED][0] / rows[FITTED]["samples"]["static"]
    for x in rows.values():
        x["samples"] = {side: factor * rate for side, rate in x["samples"].items()}
    return {
        "seconds_of_unit": 1 / factor,
        "vertical": [
            rows[cell]
            | {
                "published": max(theirs) / megatron,
                "published_samples": {"static": megatron, "balanced": max(theirs)},
                "static_over_megatron": rows[cell]["samples"]["static"] / megatron,
            }
            for cell, (megatron, *theirs) in VERTICAL.items()
        ],
        "vertical_oom": [rows[cell] for cell in VERTICAL_OOM],
    }


def _cell(blocks: int, ranks: int, stride: int) -> dict[str, Any]:
    moments = trace("sparse_attention", blocks, paper_model.SEQUENCE)[::stride]
    microbatches, even = paper_model.PER_RANK * ranks, uniform(blocks, ranks)
    static = mean(timeline(in_blocks(x), even, microbatches).makespan for x in moments)
    partitions = [exact([layer.seconds for layer in x], ranks) for x in moments]
    balanced = mean(
        timeline(x, p, microbatches).makespan for x, p in zip(moments, partitions, strict=True)
    )
    ideal = mean(perfect(x, ranks, microbatches).makespan for x in moments)
    memory = {
        name: paper_model.memory(blocks, ranks, stored)
        for name, stored in (("flash", False), ("stored", True))
    }
    return {
        "blocks": blocks,
        "ranks": ranks,
        "speed_up": static / balanced,
        "bound": static / ideal,
        "samples": {
            side: paper_model.MICROBATCH * microbatches / seconds
            for side, seconds in (("static", static), ("balanced", balanced))
        },
        "memory": memory,
        "fits": {name: need <= paper_model.H100 for name, need in memory.items()},
    }


def equal_memory(settings: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compares ZB-2p with 1F1B and ZB-1p in the same memory, for rows of Zero Bubble's table 5."""
    out: list[dict[str, Any]] = []
    for row in settings:
        p, m = row["ranks"], row["microbatches"]
        once, twice = _costs(row, 1), _costs(row, 2)
        caps = (2.0 * p,) * p  # in activations of a microbatch of the smaller size
        two = simulate(automatic(once, m, caps=caps), once)
        one = simulate(automatic(twice, m // 2, caps=caps), twice)
        plain = simulate(make("1f1b", p, m // 2), twice)
        out.append(
            {
                "model": row["model"],
                "ranks": p,
                "microbatches": m,
                "zb_2p_ms": two.span,
                "zb_1p_twice_ms": one.span,
                "1f1b_twice_ms": plain.span,
                "over_1f1b": plain.span / two.span - 1,
                "over_zb_1p": one.span / two.span - 1,
                "peak_memory": [max(x.peak_memory) for x in (two, one, plain)],
            }
        )
    return out


def _costs(row: dict[str, Any], size: int) -> Costs:
    """Returns the costs of microbatches of `size` times the size.

    Times are in milliseconds. Memory is in activations of a microbatch of the measured size.
    """
    f, b, w, comm = (size * row[f"t_{key}_ms"] for key in ("f", "b", "w", "comm"))
    costs = uniform_costs(row["ranks"], f, b, w, comm, row["w_memory_share"])
    return Costs(
        tuple(
            StageCost(x.f, x.b, x.w, size * x.mem_f, size * x.mem_b, size * x.mem_w)
            for x in costs.stages
        ),
        costs.links,
    )


def measure(stride: int) -> dict[str, Any]:
    equal = equal_memory(table_5())
    return {
        "weak": weak(stride),
        "published_weak": PUBLISHED_WEAK,
        **vertical(stride),
        "equal_memory": equal,
        "mean_over_1f1b": math.fsum(x["over_1f1b"] for x in equal) / len(equal),
        "mean_over_zb_1p": math.fsum(x["over_zb_1p"] for x in equal) / len(equal),
        "stride": stride,
    }


def emulated(ranks: Sequence[int]) -> dict[str, Any]:
    argument: dict[str, Any] = {
        "case": "pruning",
        "sequence": 2048,
        "moment": 18,
        "pairs": 3,
        "steps": 2,
    }
    sizes = {n: blocks for blocks, n in WEAK}
    return {
        "emulated": [
            run_ranks("benchmarks.traces_emulated:emulated", n, blocks=sizes[n], **argument)
            for n in ranks
        ]
    }


def tables(result: dict[str, Any]) -> dict[str, str]:
    """Returns the tables in Markdown by name, as docs/reference/results/scaling.md shows them."""
    if "emulated" in result and "weak" not in result:
        return {"emulated": emulated_table(result["emulated"])}
    texts = {
        "weak": _table(
            [
                "ranks",
                "blocks",
                "speed-up",
                "at most",
                "efficiency, static",
                "efficiency, balanced",
            ],
            [
                [f"{x['ranks']}", f"{x['blocks']}"]
                + [f"{x[key]:.2f}" for key in ("speed_up", "bound")]
                + [f"{x['efficiency'][key]:.2f}" for key in ("static", "balanced")]
                for x in result["weak"]
            ],
        ),
        "vertical": _vertical_table([*result["vertical"], *result["vertical_oom"]]),
        "equal memory": _table(
            ["model", "ranks", "microbatches", "ZB-2p faster than 1F1B", "than ZB-1p"],
            [
                [f"{x[key]}" for key in ("model", "ranks", "microbatches")]
                + [f"{100 * x[key]:.0f} %" for key in ("over_1f1b", "over_zb_1p")]
                for x in result["equal_memory"]
            ],
        ),
    }
    if "emulated" in result:
        texts["emulated"] = emulated_table(result["emulated"])
    return texts


def _vertical_table(cells: Sequence[dict[str, Any]]) -> str:
    head = ["blocks", "ranks", "speed-up", "at most", "published"]
    head += ["samples/s, static", "balanced", "Megatron-LM", "DynMo"]
    head += ["GB, flash attention", "GB, stored matrices"]
    rows: list[list[str]] = []
    for x in sorted(cells, key=lambda x: (x["blocks"], x["ranks"])):
        theirs = x.get("published_samples")
        rows.append(
            [f"{x['blocks']}", f"{x['ranks']}"]
            + [f"{x[key]:.2f}" for key in ("speed_up", "bound")]
            + [f"{x['published']:.2f}" if theirs else "OOM"]
            + [f"{x['samples'][side]:.2f}" for side in ("static", "balanced")]
            + [f"{theirs[side]:.2f}" if theirs else "OOM" for side in ("static", "balanced")]
            + [
                f"{need / 1e9:.0f}" + ("" if x["fits"][name] else " (too much)")
                for name, need in x["memory"].items()
            ]
        )
    return _table(head, rows)


def _table(head: list[str], rows: list[list[str]]) -> str:
    return markdown(head, rows, "r" * len(head))


def draw(result: dict[str, Any]) -> dict[str, Any]:
    """Draws weak scaling, and the gains at equal memory."""
    if "weak" not in result:
        return {}
    figure, (above, below) = pyplot().subplots(2, figsize=(WIDTH, 5.6))
    ranks = [x["ranks"] for x in result["weak"]]
    for name, colour, look in (
        ("static", "#d55e00", "s--"),
        ("balanced", "#0072b2", "o-"),
        ("perfect", "#333333", "^:"),
    ):
        throughput = [x["throughput"][name] for x in result["weak"]]
        above.plot(ranks, throughput, look, color=colour, label=name)
    above.set(
        xlabel="ranks (pipeline x 30 replicas)",
        ylabel="blocks of microbatches per unit",
        title="pruning, weak scaling",
        ylim=(0, None),
    )
    rows = result["equal_memory"]
    looks = {"over 1F1B": ("#d55e00", "over_1f1b"), "over ZB-1p": ("#0072b2", "over_zb_1p")}
    sides = {name: (colour, [100 * x[key] for x in rows]) for name, (colour, key) in looks.items()}
    bars(below, [f"{x['model']}\n{x['microbatches']}" for x in rows], sides)
    below.set(
        xlabel="model, microbatches of ZB-2p",
        ylabel="ZB-2p faster, %",
        title="equal memory: the others' microbatches twice as large",
    )
    for axes in (above, below):
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return {"scaling": figure}


def main() -> None:
    parser = parser_of(__doc__, draws=True, reads=True)
    add_number(parser, "stride", 1, "of the 24 moments, every so many-th")
    parser.add_argument(
        "--only",
        choices=("simulated", "emulated"),
        help="not both: the simulator's tables, or real processes",
    )
    sizes = [ranks for _, ranks in WEAK]
    parser.add_argument(
        "--ranks",
        type=int,
        nargs="+",
        choices=sizes,
        default=sizes,
        help="real processes of the emulated runs",
    )

    def measured(options: argparse.Namespace) -> dict[str, Any]:
        result = measure(options.stride) if options.only != "emulated" else {}
        return result | (emulated(options.ranks) if options.only != "simulated" else {})

    run(
        parser,
        measured,
        lambda result: print(*tables(result).values(), sep="\n\n"),
        draw,
    )


if __name__ == "__main__":
    main()
