"""A constant GPT on a busy machine: its layers should stay where they are.

Other processes keep every core busy. A small GPT, whose work never changes, trains on two ranks
with `every = "auto"`. Everything that the readings say beyond the truth is noise. A run may move
once, to a placement that is better. No move may make the steps longer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.output import main
from dynmo.config import parse

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


def settings(name: str, steps: int, blocks: int) -> dict[str, Any]:
    """Returns the config of a run."""
    return {
        "name": name,
        "model": {"blocks": blocks, "hidden": 64, "heads": 4, "sequence": 64},
        "train": {"steps": steps, "global_batch": 16, "micro_batch": 2},
        "parallel": {"pipeline": 2},
        "balance": {"every": "auto"},
        "trace": {"steps": 0},
    }


def train(folder: Path, name: str, steps: int, blocks: int) -> dict[str, Any]:
    """Runs `dynmo train` once, and returns where its layers moved."""
    config = folder / f"{name}.toml"
    config.write_text(parse(settings(name, steps, blocks)).to_toml())
    ran = subprocess.run(
        [sys.executable, "-m", "dynmo", "train", config.name],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        sys.exit(ran.stderr)
    lines = (folder / "runs" / name / "events.jsonl").read_text().splitlines()
    events: list[dict[str, Any]] = [json.loads(line) for line in lines]
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
    # The runs' folder does not hold this package, and the package may not be installed.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(Path.cwd()), os.environ.get("PYTHONPATH")))
    )
    with tempfile.TemporaryDirectory() as folder, busy_cores(busy):
        runs = [
            train(Path(folder), f"run-{i}", options.steps, options.blocks)
            for i in range(options.runs)
        ]
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
