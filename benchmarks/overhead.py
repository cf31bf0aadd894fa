"""How the costs of balancing and of freezing decisions grow with depth.

decisions   Processor seconds of one decision, by the function that a run calls, on the cost traces
            of freezing, pruning and early exit. The placement before is the even one. The model is
            DynMo's: hidden size 1,024, 2,048 tokens, microbatches of 2, as many microbatches as 4
            times the ranks. A trace of 24 or 48 blocks is repeated block by block where the model
            is deeper. `moved_bytes` and `move` are by arithmetic: 14 bytes a parameter (bfloat16,
            and a float32 master with two moments), one layer after the other over a link of 25
            GB/s. `step` is the predicted step after the move, where a dense block's F takes 0.3 ms
            (40 % of an H100's peak). All are medians over cases and moments.
egeria      Real: a GPT on one rank of one thread, 4 microbatches a step. Every second step is read,
            and every eighth one takes new references. `reading` and `reference` are the processor
            seconds that such a step takes longer than the others. `share` is their part of a step
            with the defaults of `dynamism.freezing`.

The costs of balancing in whole runs are in `benchmarks.cases`.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from statistics import median
from typing import Any

from benchmarks.cost_traces import HIDDEN, Layers, trace
from benchmarks.harness import run_ranks
from benchmarks.output import add_number, markdown, parser_of, run
from dynmo.cases.freezing import Freezing
from dynmo.cost.input_file import Link
from dynmo.plan.decide import decide as decided
from dynmo.plan.evaluate import evaluate
from dynmo.plan.partition import moves_between_ranks, uniform
from dynmo.plan.replay import question
from dynmo.plan.workload import LayerSection, Moment, Workload
from dynmo.runtime.comm.meeting import Meeting

CASES = ("freezing", "pruning", "early_exit")
BLOCKS, RANKS = (24, 48, 72, 96), (8, 16, 24)
MOMENTS = (8, 16, 23)
STEPS = 10_000
BLOCK_F = 3e-4  # seconds
BYTES = {"weight_bytes": 2, "optimizer_bytes": 12}  # of a parameter
LINK = Link(bytes_per_second=25e9)
DEPTHS = (12, 24, 48)
CYCLE = 8  # steps from one reference to the next


# -- decisions -------------------------------------------------------------------------------------


def deep(case: str, blocks: int, moment: int) -> Layers:
    """Returns a moment of a trace in seconds, with the bytes of the dense model."""
    base = 24 if blocks % 48 else 48
    halves = trace(case, base, 2048)[moment]
    pairs = zip(halves[::2], halves[1::2], strict=True)
    layers = [half for pair in pairs for half in pair * (blocks // base)]
    return tuple(
        replace(
            x,
            **{key: BLOCK_F * getattr(x, key) for key in "fbw"},
            **{key: each * (8 if i % 2 else 4) * HIDDEN**2 for key, each in BYTES.items()},
        )
        for i, x in enumerate(layers)
    )


def decide(layers: Layers, ranks: int) -> dict[str, Any]:
    """Times one decision."""
    workload = Workload(
        steps=STEPS,
        ranks=ranks,
        microbatches=4 * ranks,
        layers=LayerSection(moments=[Moment.of(0, layers)]),
        link=LINK,
    )
    start = uniform(len(layers), ranks)
    asked = question(workload, 1, layers, (layers, layers), start)
    now = evaluate(asked.problem, asked.now)
    begun = time.process_time()
    decision = decided(asked.problem, now, asked.rules, asked.readings)
    seconds = time.process_time() - begun
    moves = moves_between_ranks(start, decision.plan.partition, range(ranks))
    return {
        "decide": seconds,
        "moved_layers": len(moves),
        "moved_bytes": sum(layers[move.layer].moved_bytes for move in moves),
        "move": decision.verdict.price,
        "step": decision.plan.step,
    }


def decisions(depths: tuple[int, ...], ranks: tuple[int, ...]) -> list[dict[str, Any]]:
    """Measures decisions by depth and number of ranks."""
    rows: list[dict[str, Any]] = []
    for blocks in depths:
        for count in ranks:
            decide(deep("early_exit", blocks, 0), count)  # compiles, and makes the schedule
            each = [decide(deep(case, blocks, at), count) for case in CASES for at in MOMENTS]
            middle = {key: median(x[key] for x in each) for key in each[0]}
            row = {"blocks": blocks, "ranks": count, "microbatches": 4 * count, **middle}
            row["longest"] = max(x["decide"] for x in each)
            row["in_steps"] = median((x["decide"] + x["move"]) / x["step"] for x in each)
            rows.append(row)
    return rows


def decisions_table(rows: list[dict[str, Any]]) -> str:
    """Returns the costs of a decision by depth and ranks, in Markdown."""
    head = ["blocks", "ranks", "decide, ms", "longest, ms", "half blocks moved", "GB moved"]
    head += ["move, ms", "step, ms", "both, in steps"]
    lines = [
        [
            str(x["blocks"]),
            str(x["ranks"]),
            *(f"{1000 * x[key]:.0f}" for key in ("decide", "longest")),
            f"{x['moved_layers']:.0f}",
            f"{x['moved_bytes'] / 1e9:.1f}",
            *(f"{1000 * x[key]:.0f}" for key in ("move", "step")),
            f"{x['in_steps']:.2f}",
        ]
        for x in rows
    ]
    return markdown(head, lines, "r" * len(head))


# -- egeria ----------------------------------------------------------------------------------------


def egeria(world: Meeting, blocks: int, hidden: int, rounds: int) -> dict[str, Any]:
    """Times the steps of a run that Egeria watches, on one rank."""
    from dynmo.config import parse
    from dynmo.train.setup import model_of
    from dynmo.train.trainer import Trainer

    freezing = {"policy": "egeria", "every": 2, "window": 2, "refresh": CYCLE, "tolerance": 1e-9}
    config = parse(
        {
            "model": {
                "blocks": blocks,
                "hidden": hidden,
                "heads": 4,
                "sequence": 64,
                "vocab": 256,
            },
            "train": {"steps": CYCLE * (rounds + 1), "global_batch": 4, "micro_batch": 1},
            "balance": {"balancer": "none"},
            "dynamism": {"cases": ["freezing"], "freezing": freezing},
            "trace": {"steps": 0},
        }
    )
    trainer = Trainer(config, world, model_of(config), None)
    seconds: list[float] = []
    for _ in range(CYCLE * (rounds + 1)):
        start = time.process_time()
        trainer.turn()
        seconds.append(time.process_time() - start)
    trainer.finish(sum(seconds))
    kinds: dict[str, list[float]] = {"plain": [], "reading": [], "reference": []}
    for step, each in enumerate(seconds[CYCLE:]):  # the first cycle warms up
        kind = "plain" if step % 2 else "reading" if step % CYCLE else "reference"
        kinds[kind].append(each)
    plain, read, refer = (median(kinds[kind]) for kind in ("plain", "reading", "reference"))
    options = Freezing()
    extra = (read - plain) / options.every + (refer - read) / options.refresh
    return {
        "blocks": blocks,
        "hidden": hidden,
        "step": plain,
        "reading": read - plain,
        "reference": refer - read,
        "share": extra / plain,
    }


def egeria_table(rows: list[dict[str, Any]]) -> str:
    """Returns what Egeria's decisions cost by depth, in Markdown."""
    head = ["blocks", "step, ms", "a reading, ms", "references, ms", "share of a step"]
    lines = [
        [
            str(x["blocks"]),
            *(f"{1000 * x[key]:.0f}" for key in ("step", "reading", "reference")),
            f"{x['share']:.1%}",
        ]
        for x in rows
    ]
    return markdown(head, lines, "r" * len(head))


# -- output ----------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measures both parts, or the one of `--only`."""
    result: dict[str, Any] = {}
    if options.only != "egeria":
        stride = slice(None, None, options.stride)
        result["decisions"] = decisions(BLOCKS[stride], RANKS[stride])
    if options.only != "decisions":
        given = {"hidden": options.hidden, "rounds": options.rounds}
        result["egeria"] = [
            run_ranks("benchmarks.overhead:egeria", 1, blocks=blocks, **given)
            for blocks in DEPTHS[:: options.stride]
        ]
    return result


def show(result: dict[str, Any]) -> None:
    if "decisions" in result:
        print(decisions_table(result["decisions"]), end="\n\n")
    if "egeria" in result:
        print(egeria_table(result["egeria"]))


def main() -> None:
    parser = parser_of(__doc__, reads=True)
    parser.add_argument("--only", choices=("decisions", "egeria"), help="one of the parts alone")
    add_number(parser, "stride", 1, "take every n-th depth and number of ranks")
    add_number(parser, "hidden", 64, "hidden size of the GPT that Egeria watches")
    add_number(parser, "rounds", 2, "of 8 steps each, that Egeria watches")
    run(parser, measure, show)


if __name__ == "__main__":
    main()
