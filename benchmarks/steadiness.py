"""A constant GPT on a busy machine: its layers should stay where they are.

Other processes keep every core busy. A small GPT, whose work never changes, trains on two ranks
with `every = "auto"`. Everything that the readings say beyond the truth is noise. A run may move
once, to a placement that is better. No move may make the steps longer.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from statistics import median
from typing import Any

from benchmarks.harness import train
from benchmarks.output import main

# This program ends with the process that started it, however that ends.
_BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"


@contextmanager
def busy_cores(count: int) -> Generator[None]:
    """Keeps so many cores busy meanwhile, each by a process of its own."""
    processes = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def settings(steps: int, blocks: int) -> dict[str, Any]:
    """Returns the config of a run."""
    return {
        "model": {"blocks": blocks, "hidden": 64, "heads": 4, "sequence": 64},
        "train": {"steps": steps, "global_batch": 16, "micro_batch": 2},
        "parallel": {"pipeline": 2},
        "balance": {"every": "auto"},
        "trace": {"steps": 0},
    }


def moves_of(steps: int, blocks: int) -> dict[str, Any]:
    """Runs `dynmo train` once, and returns where its layers moved."""
    events = train(settings(steps, blocks))
    gains = {e["id"]: e["measured_gain"] for e in events if e["event"] == "rebalance_result"}
    return {
        "seconds_per_step": median(e["seconds"] for e in events if e["event"] == "step"),
        "moves": [
            {
                "step": e["step"],
                "from": e["from"],
                "to": e["to"],
                "predicted": 1 / (1 - e["predicted_gain"]),
                "measured": 1 / (1 - gains[e["id"]]) if e["id"] in gains else None,
            }
            for e in events
            if e["event"] == "rebalance"
        ],
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    busy = os.cpu_count() or 1 if options.busy < 0 else options.busy
    with busy_cores(busy):
        runs = [moves_of(options.steps, options.blocks) for _ in range(options.runs)]
    measured = [
        move["measured"] for run in runs for move in run["moves"] if move["measured"] is not None
    ]
    return {
        "most_moves": max(len(run["moves"]) for run in runs),
        "least_measured": min(measured, default=None),
        "moves": [len(run["moves"]) for run in runs],
        "busy_processes": busy,
        "steps": options.steps,
        "blocks": options.blocks,
        "runs": runs,
    }


if __name__ == "__main__":
    main(
        __doc__ or "",
        measure,
        [
            ("runs", 10, "of dynmo train"),
            ("steps", 200, "of each"),
            ("blocks", 3, "of the GPT"),
            ("busy", -1, "processes that keep cores busy; -1: one for each core"),
        ],
    )
