"""Counted tokens a second with fixed rows, grouped and packed samples.

Two sources of lengths: the functions of Python's standard library, with a tokenizer trained on
them, and a long-tailed draw (lognormal). A length is cut at the sequence.

Simulated: 8 ranks run zb-h1. A microbatch costs what its rows cost by arithmetic, for a Llama of 7
billion weights. F, B and W of a stage cost alike. Messages are free. `even` is the limit: the same
samples without padding, in microbatches that all cost alike.

Real: 2 ranks train a Llama of drawn weights on the functions with `dynmo train`, the three ways in
turn. `tokens/s` is the median run. `limit` is what the same arithmetic says for these samples.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from benchmarks.harness import train
from benchmarks.output import WIDTH, add_number, markdown, parser_of, pyplot, run
from benchmarks.waiting import functions, save_model
from dynmo.data.grouping import RowCost, grouped, packed
from dynmo.data.order import Order
from dynmo.schedule.catalogue import make
from dynmo.schedule.op import Op, Schedule, dependencies

WAYS = ("rows", "grouped", "packed")
# A Llama of 7 billion weights: 2 a weight for a token, 2 a channel and layer for half a row.
_COST = RowCost(2 * 6_700_000_000, 2 * 4096 * 32)
_RANKS, _MICROBATCHES, _MICRO_BATCH, _SEQUENCE = 8, 16, 4, 2048
_REAL = {"sequence": 256, "micro_batch": 4, "microbatches": 4}


def microbatch_costs(
    way: str, lengths: Sequence[int], count: int, sequence: int, cost: RowCost
) -> list[int]:
    """Returns what the microbatches of a step cost. `even` has no padding, and all alike."""
    size = len(lengths) // count
    if way == "even":
        return [sum(cost.of(1, length) for length in lengths) // count] * count
    if way == "rows":
        groups = [list(range(at, at + size)) for at in range(0, len(lengths), size)]
        return [cost.of(size, max(lengths[i] for i in group)) for group in groups]
    if way == "grouped":
        groups = grouped(lengths, count, size * sequence, cost)
        return [cost.of(len(group), lengths[group[0]]) for group in groups]
    costs = list[int]()
    for rows in packed(lengths, count, size * sequence, sequence, cost):
        costs.append(cost.of(len(rows), max(sum(lengths[i] for i in row) for row in rows)))
    return costs


def span(schedule: Schedule, costs: Sequence[float]) -> float:
    """Replays a schedule whose microbatches differ: a third of a cost for F, B and W of a stage."""
    ended = dict[Op, float]()
    free, at = [0.0] * schedule.ranks, [0] * schedule.ranks
    moved = True
    while moved:
        moved = False
        for rank, ops in enumerate(schedule.ops):
            while at[rank] < len(ops):
                op = ops[at[rank]]
                needed = [each.op for each in dependencies(schedule, op)]
                if any(each not in ended for each in needed):
                    break
                start = max([free[rank], *(ended[each] for each in needed)])
                ended[op] = free[rank] = start + costs[op.microbatch] / 3 / schedule.ranks
                at[rank] += 1
                moved = True
    assert all(done == len(ops) for done, ops in zip(at, schedule.ops, strict=True))
    return max(free)


def simulated(
    lengths: Sequence[int],
    steps: int,
    *,
    ranks: int,
    microbatches: int,
    micro_batch: int,
    sequence: int,
    cost: RowCost,
) -> dict[str, float]:
    """Returns counted tokens by a unit of cost, for each way and for the limit."""
    order = Order(len(lengths), microbatches * micro_batch, micro_batch, seed=0)
    schedule = make("zb-h1", ranks, microbatches)
    spans = dict.fromkeys((*WAYS, "even"), 0.0)
    counted = 0
    for step in range(steps):
        found = [min(lengths[at], sequence) for at in order.train(step).ravel().tolist()]
        counted += sum(found) - len(found)
        for way in spans:
            costs = microbatch_costs(way, found, microbatches, sequence, cost)
            spans[way] += span(schedule, costs)
    return {way: counted / taken for way, taken in spans.items()}


def drawn(count: int) -> list[int]:
    """Lengths with a long tail: half below 200, and one of a hundred above 3,000."""
    draws = np.random.Generator(np.random.Philox(0)).lognormal(np.log(200), 1.2, count)
    return [max(2, int(length)) for length in draws]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="dynmo-benchmark-") as name:
        folder = Path(name)
        texts = list(functions())
        lines = folder / "functions.jsonl"
        lines.write_text("\n".join(json.dumps({"text": text}) for text in texts))
        save_model(folder / "model", texts, options.hidden, _REAL["sequence"])
        tokenizer: Any = AutoTokenizer.from_pretrained(folder / "model")
        # The end-of-text token follows.
        real = [len(ids) + 1 for ids in tokenizer(texts, verbose=False)["input_ids"]]
        sources = {"functions": real, "drawn": drawn(len(real))}
        return {
            "simulated": [
                {"source": source, **_row(_simulate(lengths, options.steps))}
                for source, lengths in sources.items()
            ],
            "real": _measure_real(folder, real, options),
            "histogram": {source: histogram(lengths) for source, lengths in sources.items()},
        }


def _simulate(lengths: Sequence[int], steps: int) -> dict[str, float]:
    return simulated(
        lengths,
        steps,
        ranks=_RANKS,
        microbatches=_MICROBATCHES,
        micro_batch=_MICRO_BATCH,
        sequence=_SEQUENCE,
        cost=_COST,
    )


def _row(speeds: dict[str, float]) -> dict[str, float]:
    return {way: speed / speeds["rows"] for way, speed in speeds.items()}


def _measure_real(
    folder: Path, lengths: Sequence[int], options: argparse.Namespace
) -> dict[str, Any]:
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(options.rounds):
        for way in WAYS[turn % 3 :] + WAYS[: turn % 3]:
            taken[way].append(_train(folder, way, options.real_steps))
    hidden, blocks = options.hidden, 4
    weights = blocks * 13 * hidden**2 + 2 * 2000 * hidden
    limits = simulated(
        lengths,
        options.real_steps,
        ranks=2,
        microbatches=_REAL["microbatches"],
        micro_batch=_REAL["micro_batch"],
        sequence=_REAL["sequence"],
        cost=RowCost(2 * weights, 2 * hidden * blocks),
    )
    return {
        "rows": [
            {
                "way": way,
                "tokens_per_s": median(taken[way]),
                "over_rows": median(a / b for a, b in zip(taken[way], taken["rows"], strict=True)),
                "limit": limits[way] / limits["rows"],
            }
            for way in WAYS
        ],
        "even": limits["even"] / limits["rows"],
    }


def _train(folder: Path, way: str, steps: int) -> float:
    """Returns the counted tokens a second of a run, without its first step."""
    events = train(
        {
            "model": {"kind": "hf", "path": f"{folder}/model", "sequence": _REAL["sequence"]},
            "data": {"source": f"jsonl:{folder}/functions.jsonl", "batching": way},
            "train": {
                "steps": steps,
                "global_batch": _REAL["microbatches"] * _REAL["micro_batch"],
                "micro_batch": _REAL["micro_batch"],
            },
            "pipeline": {"schedule": "zb-h1"},
            "parallel": {"pipeline": 2},
        }
    )
    rows = [event for event in events if event["event"] == "step"][1:]
    seconds = sum(row["seconds"] for row in rows)
    return sum(row["tokens_per_s"] * row["seconds"] for row in rows) / seconds


def histogram(lengths: Sequence[int]) -> dict[str, list[int]]:
    """Counts lengths between powers of two."""
    edges = [2**power for power in range(1, 15)]
    counts, _ = np.histogram(np.clip(lengths, 2, edges[-1] - 1), edges)
    return {"edges": edges, "counts": counts.tolist()}


def simulated_table(result: dict[str, Any]) -> str:
    rows = [
        [row["source"], *(f"{row[way]:.2f}" for way in (*WAYS, "even"))]
        for row in result["simulated"]
    ]
    return markdown(["lengths", *WAYS, "limit"], rows)


def real_table(result: dict[str, Any]) -> str:
    rows = [
        [
            row["way"],
            f"{row['tokens_per_s']:,.0f}",
            f"{row['over_rows']:.2f}",
            f"{row['limit']:.2f}",
        ]
        for row in result["real"]["rows"]
    ]
    rows.append(["no padding, all alike", "", "", f"{result['real']['even']:.2f}"])
    return markdown(["microbatches", "counted tokens/s", "over rows", "by arithmetic"], rows)


def draw(result: dict[str, Any]) -> dict[str, Any]:
    """Draws how many samples have which length: a panel for each source."""
    plt = pyplot()
    figure, panels = plt.subplots(1, 2, figsize=(WIDTH, 3), sharey=True)
    for axes, (source, found) in zip(panels, result["histogram"].items(), strict=True):
        edges, counts = found["edges"], found["counts"]
        axes.bar(range(len(counts)), counts, width=0.9, color="#0072b2")
        axes.set_xticks(range(len(counts)), [str(edge) for edge in edges[:-1]], rotation=60)
        axes.set(title=source, xlabel="tokens, from ... to the next")
    panels[0].set_ylabel("samples")
    return {"batching": figure}


def show(result: dict[str, Any]) -> None:
    print(f"{simulated_table(result)}\n\n{real_table(result)}")


def main() -> None:
    parser = parser_of(__doc__, draws=True, reads=True)
    add_number(parser, "steps", 50, "simulated steps")
    add_number(parser, "rounds", 3, "runs of each way")
    add_number(parser, "real_steps", 30, "steps of a run")
    add_number(parser, "hidden", 256, "hidden size")
    run(parser, measure, show, draw)


if __name__ == "__main__":
    main()
