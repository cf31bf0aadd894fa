"""`dynmo profile` on slices of the GPU, and `dynmo plan` on its costs file.

The plan is for eight ranks.

`--out FILE` keeps the costs file: `dynmo plan --costs FILE` then plans for this GPU on any machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.device import Option, Shape, Verdict, main, progress
from dynmo.config import parse

ROOT = Path(__file__).resolve().parents[2]


def command(*arguments: str) -> dict[str, Any]:
    """Runs a dynmo command and returns the object that it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "dynmo", *arguments, "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    sys.stderr.write(done.stderr)
    if done.returncode:
        last = (done.stderr.splitlines() or ["no output"])[-1]
        raise RuntimeError(f"dynmo {arguments[0]} ended with status {done.returncode}: {last}")
    return json.loads(done.stdout)


def measure(device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """Profiles a GPT on slices, and plans on the costs file."""
    config = parse(
        {
            "name": "gpu-profile",
            "data": {"source": "stdlib" if device.type == "cuda" else f"file:{ROOT / 'LICENSE'}"},
            "model": Shape.of(options).model,
            "train": Shape.of(options).train,
            "parallel": {"pipeline": options.slices, "slices": True, "device": device.type},
        }
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "run.toml").write_text(config.to_toml(), encoding="utf-8")
        costs = Path(options.out) if options.out else folder / "costs.json"
        profile = command(
            "profile", str(folder / "run.toml"), "--steps", str(options.steps), "--out", str(costs)
        )
        progress("the layers are measured")
        plan = command("plan", "--costs", str(costs), "--ranks", "8")
    seconds = {op: sum(profile[op]) for op in "fbw"}
    return {"layers": len(profile["names"]), "microbatch_seconds": seconds, "plan": plan}


def assess(result: dict[str, Any]) -> Verdict:
    f, b, w = (1e3 * result["microbatch_seconds"][op] for op in "fbw")
    return Verdict(
        min(f, b, w) > 0,
        f"{result['layers']} layers, F {f:.2f} B {b:.2f} W {w:.2f} ms a microbatch, "
        "planned for 8 ranks",
    )


OPTIONS = (
    Option("slices", 4, 2, "slices"),
    Option("blocks", 6, 4, "blocks"),
    Option("hidden", 2048, 32, "width"),
    Option("sequence", 2048, 16, "tokens"),
    Option("batch", 2, 1, "sequences of a microbatch"),
    Option("microbatches", 8, 4, "microbatches of a step"),
    Option("steps", 3, 1, "measured steps"),
)

if __name__ == "__main__":
    main(__doc__ or "", measure, assess, OPTIONS)
