"""Evaluation with early exits: its speed and its loss, by threshold.

One GPT is trained with exits (CALM, softmax), with a high threshold, so that nearly all tokens
train all blocks. Then the same weights are evaluated under each threshold and without exits, in
turn, on the same held-out windows. One rank of one thread; medians of counted turns. `limit` is the
speed-up by arithmetic from the measured shares: blocks, exits and heads that are not computed, keys
and values of all tokens.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Any

from torch import Tensor, nn

from benchmarks.harness import run_ranks
from benchmarks.learning import block_flops
from benchmarks.output import add_number, markdown, parser_of, run
from benchmarks.quality import config_of
from dynmo.cases.early_exit.layers import ExitHead
from dynmo.config import Config
from dynmo.runtime.comm.meeting import Meeting
from dynmo.train.setup import model_of
from dynmo.train.trainer import Trainer

THRESHOLDS = (0.9, 0.7, 0.5, 0.3, 0.1, 0.0)
BLOCKS, EXITS = 8, (2, 4)


def limit(config: Config, shares: Sequence[float]) -> float:
    """Returns the speed-up of a forward by arithmetic."""
    head = 2 * config.model.vocab * config.model.hidden
    remaining, total = 1.0, 0.0
    for block in range(BLOCKS):
        total += block_flops(config, remaining, 1.0, remaining)
        if block in EXITS:
            total += head * remaining
            remaining -= shares[EXITS.index(block)]
    return (BLOCKS * block_flops(config, 1.0, 1.0, 1.0) + head) / (total + head * remaining)


class Evaluation:
    """Evaluates a trained model on its held-out windows, with exits or without."""

    def __init__(self, trainer: Trainer) -> None:
        train, self._pipeline = trainer.config.train, trainer.pipeline
        self._batches = train.eval_batches
        self._inputs, self._targets, _ = trainer._data.evaluation(self._batches)
        self._tokens = self._batches * train.micro_batch * trainer.config.model.sequence
        self._heads = [x for x in self._pipeline.mesh.modules.values() if isinstance(x, ExitHead)]
        self._exited: Counter[nn.Module] = Counter()
        for head in self._heads:
            head.register_forward_hook(self._count)

    def run(self, threshold: float | None) -> tuple[float, float, list[float]]:
        """Returns the loss, the seconds, and the share of the tokens that left at each exit."""
        for head in self._heads:
            head.exits = threshold is not None
            head.threshold = threshold or 0.0
        self._exited.clear()
        start = time.perf_counter()
        loss = self._pipeline.evaluate(self._inputs, self._targets, microbatches=self._batches)
        seconds = time.perf_counter() - start
        return loss, seconds, [self._exited[head] / self._tokens for head in self._heads]

    def _count(
        self, head: nn.Module, before: tuple[Tensor, ...], after: tuple[Tensor, ...]
    ) -> None:
        self._exited[head] += len(before[1]) - len(after[1])  # the tokens that are computed


def measure(world: Meeting, steps: int, hidden: int, sequence: int, rounds: int) -> dict[str, Any]:
    """Runs on the one rank: trains, then evaluates."""
    case = {
        "cases": ["early_exit"],
        "early_exit": {"exits": list(EXITS), "threshold": 0.99, "start": steps - 1},
    }
    config = config_of(steps, 0, case, 1, 8, hidden, {"blocks": BLOCKS, "sequence": sequence})
    trainer = Trainer(config, world, model_of(config), None)
    trainer.run()
    evaluation = Evaluation(trainer)
    turns = [
        {threshold: evaluation.run(threshold) for threshold in (None, *THRESHOLDS)}
        for _ in range(rounds + 1)
    ][1:]
    rows: list[dict[str, Any]] = []
    for threshold in THRESHOLDS:
        loss, _, shares = turns[0][threshold]
        rows.append(
            {
                "threshold": threshold,
                "exited": shares,
                "loss": loss,
                "speedup": median(turn[None][1] / turn[threshold][1] for turn in turns),
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
    """Returns the table in Markdown, as docs/reference/results/loss.md shows it."""
    head = ["threshold", "exited at each exit", "held-out loss", "evaluation", "limit"]
    lines = [["no exits", "", f"{result['loss_without_exits']:.3f}", "x1.00", ""]]
    for row in result["rows"]:
        shares = ", ".join(f"{share:.0%}" for share in row["exited"])
        speeds = [f"x{row[key]:.2f}" for key in ("speedup", "limit")]
        lines.append([f"{row['threshold']}", shares, f"{row['loss']:.3f}", *speeds])
    return markdown(head, lines, "r" * len(head))


def main() -> None:
    parser = parser_of(__doc__, reads=True)
    add_number(parser, "steps", 400, "of the training")
    add_number(parser, "hidden", 256, "hidden size of the model")
    add_number(parser, "sequence", 128, "tokens of a row")
    add_number(parser, "rounds", 7, "counted turns")

    def measured(options: argparse.Namespace) -> dict[str, Any]:
        sizes = {key: getattr(options, key) for key in ("steps", "hidden", "sequence", "rounds")}
        return run_ranks("benchmarks.exit_thresholds:measure", 1, **sizes)

    run(parser, measured, lambda result: print(table(result)))


if __name__ == "__main__":
    main()
