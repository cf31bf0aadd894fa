"""Remakes result files with their pictures, and the documents that show them: `make results`.

    make results QUICK=1                every simulated figure
    make results ONLY="cases joined"    some benchmarks, whole
    make results                        all of them, one after the other: hours

A run writes its result file only if it ends well. A run that measures a part of a benchmark leaves
the other parts of the file as they are. Run the emulated and the real ones on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from docs.tools.figures import RESULTS

ROOT = RESULTS.parents[1]
_WRITES = threading.Lock()


@dataclass(frozen=True)
class Run:
    """One command that writes a result file, or a part of it.

    Attributes:
        kind: "simulated", "emulated" or "real". Simulated figures need no idle machine.
        draws: Whether the benchmark draws pictures from the file.
        file: Name of the result file. Empty: the benchmark's.
    """

    benchmark: str
    kind: str
    options: str = ""
    draws: bool = False
    file: str = ""

    @property
    def path(self) -> Path:
        return RESULTS / f"{self.file or self.benchmark}.json"

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", f"benchmarks.{self.benchmark}", *self.options.split()]


# The simulated ones run two at once, so the longest come first.
RUNS = (
    Run("traces", "simulated", "--only simulated", draws=True),
    Run("joined", "simulated", "--only simulated", draws=True),
    Run("experts", "simulated", draws=True),
    Run("traces", "simulated", "--only stepwise"),
    Run("bubbles", "simulated", draws=True),
    Run("delays", "simulated", "--only simulated", draws=True),
    Run("exact", "simulated"),
    Run("placement", "simulated", "--only lemmas"),
    Run("repack", "simulated", "--only searched"),
    Run("repack", "simulated", "--only cases --blocks 24 48", draws=True),
    Run("repack", "simulated", "--only pipetransformer"),
    Run("reshape", "simulated", "--stride 8", draws=True),
    Run("scaling", "simulated", "--only simulated", draws=True),
    Run("sweeps", "simulated", draws=True),
    Run("traces", "simulated", "--only growth"),
    Run("zero_bubble", "simulated", draws=True),
    Run("delays", "emulated", "--only emulated"),
    Run("executor", "emulated"),
    Run("expert_parallel", "emulated"),
    Run("joined", "emulated", "--only emulated"),
    Run("post_validation", "emulated"),
    Run("repack", "emulated", "--only emulated", draws=True),
    Run("scaling", "emulated", "--only emulated"),
    Run("traces", "emulated", "--only emulated"),
    Run("unequal", "emulated"),
    Run("uneven", "emulated"),
    Run("balanced_routing", "real"),
    Run("batching", "real", draws=True),
    Run("cases", "real", draws=True),
    Run("copies", "real"),
    Run("decision_path", "real"),
    Run("step_path", "real"),
    Run("deferred", "real"),
    Run("elastic", "real"),
    Run("executor_families", "real"),
    Run("exit_thresholds", "real"),
    Run("faults", "real", "--draws 1000 --jobs 2"),
    Run("faults.steady", "emulated", file="steady_faults"),
    Run("finetune", "real"),
    Run("freezing", "real"),
    Run("handed_on", "real"),
    Run("heavy_head", "real"),
    Run("host", "real"),
    Run("learning", "real", draws=True),
    Run("learning", "real", "--what experts", draws=True, file="learning_experts"),
    Run("long_run", "real", draws=True),
    Run("many_ranks", "real"),
    Run("overhead", "real"),
    Run("placement", "real"),
    Run("planner", "real", draws=True),  # it times the planning, too
    Run("quality", "real", draws=True),
    Run("quality", "real", "--hidden 128", file="quality_narrow"),
    Run("ragged", "real"),
    Run("replicas", "real"),
    Run("router_loads", "real"),
    Run("saving", "real"),
    Run("savings", "real", draws=True),
    Run("savings_experts", "real"),
    Run("savings_tokens", "real"),
    Run("stand_ins", "real"),
    Run("steadiness", "real"),
    Run("waiting", "real"),
)


def remake(run: Run, console: Console) -> bool:
    """Runs one command, writes its file and draws its picture. Returns False if it failed."""
    start = time.perf_counter()
    console.print(f"{run.benchmark} {run.options} ({run.kind})", markup=False)
    printed = _output(run, ["--json"], console)
    if printed is None:
        return False
    result = json.loads(printed)
    with _WRITES:  # two parts of one file may end together
        old = json.loads(run.path.read_text()) if run.path.exists() else {}
        machine = result.pop("machine")
        merged = {key: value for key, value in (old | result).items() if key != "machine"}
        run.path.write_text(json.dumps(merged | {"machine": machine}) + "\n")
    if run.draws and _output(run, ["--read", str(run.path), "--plot"], console) is None:
        return False
    console.print(f"{run.path.name:24} {run.kind:10} {time.perf_counter() - start:6.0f} s")
    return True


def _output(run: Run, options: Sequence[str], console: Console) -> str | None:
    """Returns what the command prints. None, and a line on the console, if it fails."""
    done = subprocess.run([*run.command, *options], cwd=ROOT, capture_output=True, text=True)
    if not done.returncode:
        return done.stdout
    last = done.stderr.strip().splitlines()[-1:] or ["no message"]
    console.print(
        f"{' '.join(run.command[2:])} ended with status {done.returncode}: {last[0]}", markup=False
    )
    return None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("only", nargs="*", metavar="BENCHMARK", help="these alone")
    parser.add_argument("--quick", action="store_true", help="simulated figures alone")
    options = parser.parse_args()
    unknown = set(options.only) - {run.benchmark for run in RUNS}
    if unknown:
        known = ", ".join(dict.fromkeys(run.benchmark for run in RUNS))
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {known}")
    runs = [
        run
        for run in RUNS
        if (not options.only or run.benchmark in options.only)
        and (not options.quick or run.kind == "simulated")
    ]
    console = Console(stderr=True)
    # Two simulations may run at once. A measurement runs alone.
    simulated = [run for run in runs if run.kind == "simulated"]
    with ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(lambda run: remake(run, console), simulated))
    ended += [remake(run, console) for run in runs if run.kind != "simulated"]
    # In a process of its own, which reads the new files.
    subprocess.run([sys.executable, "-m", "docs.tools"], cwd=ROOT, check=True)
    return 0 if all(ended) else 1


if __name__ == "__main__":
    sys.exit(main())
