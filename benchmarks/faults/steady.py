"""A long run with a kill at every 100th step: `python -m benchmarks.faults.steady`.

Emulated: 4 ranks whose layers sleep, 0.3 s a step. At every 100th step a rank is killed, each time
another one. The processes are those of `dynmo train`. Three ways to go on, over the same steps
without a kill:

live      the others go on from copies in memory, and a new process takes the place
restarts  the launcher starts all ranks again, from a checkpoint of every 50 steps. Measured over
          fewer steps: each restart costs the same
by hand   by arithmetic: checkpoints of every 10 minutes, and the restarts' seconds
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import ChainMap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import tomli_w

from benchmarks.faults.inject import Fault
from benchmarks.output import add_number, machine, parser_of, show
from dynmo.errors import RunError

RANKS, LAYERS, MICROBATCHES = 4, 12, 8
BY_HAND = 600.0
"""Seconds between two checkpoints of a user who restarts by hand."""


def settings(steps: int, seconds: float) -> dict[str, Any]:
    """Returns the config of the run without a fault."""
    # A stage works on each microbatch, and once more for each stage before and behind it.
    pass_ = seconds / (LAYERS / RANKS * (MICROBATCHES + RANKS - 1)) / 3
    return {
        "name": "run",
        "model": {"kind": "emulated", "layers": LAYERS, "f": pass_, "b": pass_, "w": pass_},
        "train": {"steps": steps, "global_batch": MICROBATCHES, "micro_batch": 1},
        "parallel": {"pipeline": RANKS, "timeout": 10},
        "pipeline": {"schedule": "zb-h1"},
        "balance": {"balancer": "none"},
        "dynamism": {"cases": ["python:benchmarks.faults.inject:Strikes"]},
        "checkpoint": {"every": 0},
        "trace": {"steps": 0},
    }


def run(config: dict[str, Any], kills: Sequence[int]) -> dict[str, Any]:
    """Trains, and returns the seconds from the first step to the last, and those of each kill."""
    faults = [Fault("kill", "F", at % RANKS, step) for at, step in enumerate(kills)]
    with tempfile.TemporaryDirectory(prefix="dynmo-steady-") as name:
        folder = Path(name)
        (folder / "run.toml").write_text(tomli_w.dumps(config))
        given = {"DYNMO_FAULTS": json.dumps([asdict(fault) for fault in faults])}
        given |= {"DYNMO_FAULTS_FOLDER": name, "PYTHONPATH": str(Path(__file__).parents[2])}
        done = subprocess.run(
            [sys.executable, "-m", "dynmo", "train", "run.toml"],
            cwd=folder,
            env=os.environ | given,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RunError(f"the run ended with status {done.returncode}: {done.stderr[-1000:]}")
        lines = (folder / "runs/run/events.jsonl").read_text().splitlines()
        struck = [json.loads(path.read_text())["time"] for path in folder.glob("struck-*")]
    events = [json.loads(line) for line in lines]
    steps = [event for event in events if event["event"] == "step"]
    times = [event["time"] for event in steps]
    waits = [min(t for t in times if t > begin) - begin for begin in struck]
    return {
        "seconds": times[-1] - times[0],
        "kills": len(struck),
        "recoveries": sum(event["event"] == "recover" for event in events),
        "repeated": len(steps) - len({event["step"] for event in steps}),
        "to_next_step": median(waits) if waits else None,
        "longest_to_next_step": max(waits, default=None),
        "step": median(event["seconds"] for event in steps),
        "digest": [event["weights_digest"] for event in events if event["event"] == "end"][-1],
    }


def by_hand(steps: int, every: int, step: float, restart: float) -> float:
    """Returns the seconds of a run that is restarted by hand, by arithmetic.

    Args:
        steps: Steps of the run.
        every: Steps between two kills. Each strikes once.
        step: Seconds of a step.
        restart: Seconds of a restart.
    """
    saves = round(BY_HAND / step)
    kills = range(every, steps, every)
    return (steps + sum(at % saves for at in kills)) * step + restart * len(kills)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Returns figures of each way."""
    every = options.every
    plain = settings(options.steps, options.seconds)
    fewer = settings(min(options.steps, options.restart_steps), options.seconds)
    kills = [range(every, each["train"]["steps"], every) for each in (plain, fewer)]
    ways: dict[str, tuple[dict[str, Any], range]] = {
        "undisturbed": (plain, range(0)),
        "live": (plain | {"elastic": {"recover": "memory"}}, kills[0]),
        "restarts": (
            fewer | {"checkpoint": {"every": 50, "keep": 1}, "launch": {"restarts": len(kills[1])}},
            kills[1],
        ),
    }
    figures: dict[str, Any] = {"steps": options.steps, "every": every, "ranks": RANKS}
    for way in options.only or ways:
        figures[way] = {"steps": ways[way][0]["train"]["steps"], **run(ways[way][0], ways[way][1])}
    return figures | {"machine": machine()}


def compare(figures: dict[str, Any]) -> dict[str, Any]:
    """Adds how much longer each way takes, if all were measured."""
    if not figures.keys() >= {"undisturbed", "live", "restarts"}:
        return figures
    steps, undisturbed, restarts = figures["steps"], figures["undisturbed"], figures["restarts"]
    step, kills = undisturbed["seconds"] / (steps - 1), len(range(0, steps, figures["every"])) - 1
    # What a kill costs, with the steps that are repeated and without them.
    lost = (restarts["seconds"] - (restarts["steps"] - 1) * step) / max(1, restarts["kills"])
    restart = lost - restarts["repeated"] * step / max(1, restarts["kills"])
    hand = by_hand(steps, figures["every"], step, restart)
    over = {
        "live": figures["live"]["seconds"] / undisturbed["seconds"],
        "restarts": 1 + kills * lost / undisturbed["seconds"],
        "by_hand": hand / undisturbed["seconds"],
    }
    same = figures["live"]["digest"] == undisturbed["digest"]
    return figures | {"restart_seconds": restart, "over_undisturbed": over, "same": same}


def main() -> None:
    parser = parser_of(__doc__)
    add_number(parser, "steps", 3000, "steps of the run")
    add_number(parser, "every", 100, "steps between two kills")
    add_number(parser, "seconds", 0.3, "seconds of a step")
    add_number(parser, "restart_steps", 600, "most steps of the run with restarts")
    text = "these ways alone: undisturbed, live, restarts"
    parser.add_argument("--only", nargs="*", metavar="WAY", help=text)
    text = "figures of such runs, instead of measuring"
    parser.add_argument("--read", type=Path, nargs="+", metavar="FILE", help=text)
    options = parser.parse_args()
    read = [json.loads(path.read_text()) for path in options.read or ()]
    figures = compare({**ChainMap(*read)} if read else measure(options))
    print(json.dumps(figures)) if options.json else show(figures)


if __name__ == "__main__":
    main()
