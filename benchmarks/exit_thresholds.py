"""Evaluation with early exits: its speed and its loss, by threshold.

One GPT is trained with exits (CALM, softmax), with a high threshold, so that nearly all tokens
train all blocks. Then the same weights are evaluated under each threshold and without exits, in
turn, on the same held-out windows. One rank of one thread; medians of counted turns. `limit` is the
speed-up by arithmetic from the measured shares: blocks, exits and heads that are not computed, keys
and values of all tokens.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from torch import Tensor, nn

from benchmarks.harness import machine, run_ranks
from benchmarks.learning import block_flops
from benchmarks.quality import config_of
from dynmo.config import Config
from dynmo.models.early_exit import ExitHead
from dynmo.models.registry import load_model
from dynmo.runtime.comm.world import World
from dynmo.train.trainer import Trainer

THRESHOLDS = (0.9, 0.7, 0.5, 0.3, 0.1, 0.0)
BLOCKS, EXITS = 8, (2, 4)


def limit(config: Config, shares: Sequence[float]) -> float:
    """Returns the speed-up of a forward by arithmetic.

    Args:
        config: Config of the run.
        shares: Share of all tokens that leaves at each exit.
    """
    head = 2 * config.model.vocab * config.model.hidden
    remaining, total = 1.0, 0.0
    for block in range(BLOCKS):
        total += block_flops(config, remaining, 1.0, remaining)
        if block in EXITS:
            total += head * remaining
            remaining -= shares[EXITS.index(block)]
    return (BLOCKS * block_flops(config, 1.0, 1.0, 1.0) + head) / (total + head * remaining)


def measure(world: World, steps: int, hidden: int, sequence: int, rounds: int) -> dict[str, Any]:
    """Runs on the one rank: trains, then evaluates.

    Args:
        world: The one rank.
        steps: Steps of the run.
        hidden: Width of the model.
        sequence: Tokens of a sequence.
        rounds: Number of counted turns.
    """
    case = {
        "cases": ["early_exit"],
        "early_exit": {"exits": list(EXITS), "threshold": 0.99, "start": steps - 1},
    }
    config = config_of(steps, 0, case, 1, 8, hidden, {"blocks": BLOCKS, "sequence": sequence})
    trainer = Trainer(config, world, load_model(config), None)
    trainer.run()
    pipeline, batches = trainer.pipeline, config.train.eval_batches
    inputs, targets, _ = trainer._loader.held_out(batches)
    heads = [module for module in pipeline.modules if isinstance(module, ExitHead)]
    gone: Counter[nn.Module] = Counter()

    def count(head: nn.Module, before: tuple[Tensor, ...], after: tuple[Tensor, ...]) -> None:
        gone[head] += len(before[1]) - len(after[1])  # the tokens that are computed

    for head in heads:
        head.register_forward_hook(count)

    def evaluate(threshold: float | None) -> tuple[float, float, list[float]]:
        """Returns loss, seconds, and shares of the tokens that left. None: without exits."""
        for head in heads:
            head.exits = threshold is not None
            head.rule = replace(head.rule, threshold=threshold or 0.0)
        gone.clear()
        start = time.perf_counter()
        loss = pipeline.evaluate(inputs, targets, batches)
        tokens = batches * config.train.micro_batch * sequence
        return loss, time.perf_counter() - start, [gone[head] / tokens for head in heads]

    turns = [
        {threshold: evaluate(threshold) for threshold in (None, *THRESHOLDS)}
        for _ in range(rounds + 1)
    ][1:]
    rows: list[dict[str, Any]] = []
    for threshold in THRESHOLDS:
        loss, _, shares = turns[0][threshold]
        speed = median(turn[None][1] / turn[threshold][1] for turn in turns)
        rows.append(
            {
                "threshold": threshold,
                "exited": shares,
                "loss": loss,
                "speedup": speed,
                "limit": limit(config, shares),
            }
        )
    return {
        "steps": steps,
        "hidden": hidden,
        "sequence": sequence,
        "loss_without_exits": turns[0][None][0],
        "rows": rows,
    }


def table(result: dict[str, Any]) -> str:
    """Returns the table in Markdown, as docs/cases.md shows it."""
    head = ["threshold", "exited at each exit", "held-out loss", "evaluation", "limit"]
    lines = [
        head,
        ["---:"] * len(head),
        ["no exits", "", f"{result['loss_without_exits']:.3f}", "x1.00", ""],
    ]
    for row in result["rows"]:
        shares = ", ".join(f"{share:.0%}" for share in row["exited"])
        lines.append(
            [
                f"{row['threshold']}",
                shares,
                f"{row['loss']:.3f}",
                f"x{row['speedup']:.2f}",
                f"x{row['limit']:.2f}",
            ]
        )
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument(
        "--read",
        type=Path,
        metavar="FILE",
        help="figures of an earlier --json, instead of measuring",
    )
    parser.add_argument("--steps", type=int, default=400, help="of the training (default 400)")
    parser.add_argument(
        "--hidden", type=int, default=256, help="hidden size of the model (default 256)"
    )
    parser.add_argument("--sequence", type=int, default=128, help="tokens of a row (default 128)")
    parser.add_argument("--rounds", type=int, default=7, help="counted turns (default 7)")
    options = parser.parse_args()
    if options.read:
        result: dict[str, Any] = json.loads(options.read.read_text())
    else:
        given = {
            "steps": options.steps,
            "hidden": options.hidden,
            "sequence": options.sequence,
            "rounds": options.rounds,
        }
        result = run_ranks("benchmarks.exit_thresholds:measure", 1, **given) | {
            "machine": machine()
        }
    print(json.dumps(result) if options.json else table(result))


if __name__ == "__main__":
    main()
