"""Runs random cases. Call it from the root of the repository.

1000 cases:                      python -m tests.fuzz --cases 1000 --seed 1
Case 37 again:                   python -m tests.fuzz --seed 1 --only 37
Runs for `tests.digests`:        python -m tests.fuzz --cases 200 --write runs/drawn.jsonl
The figure of the README:        python -m tests.fuzz --cases 48 --out benchmarks/results/fuzz.json
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from dynmo.train.compile_ahead import prepare
from tests.fuzz.draws import draw
from tests.fuzz.modules import run_modules
from tests.fuzz.outcome import EQUAL, FAILED, REFUSED, CaseResult
from tests.fuzz.recorded import write_case
from tests.fuzz.report import commit_of_files, passed, replay, summary, write_counts
from tests.fuzz.runner import run_all


class Progress:
    """Prints a failure at once, and every 5 s how far the cases are.

    Args:
        total: Number of cases.
        folder: Folder for the TOML files of failures.
        repeat: Command that runs one case again, without its number.
        write: File for the cases that are equal, with their digests. None writes none.
    """

    def __init__(self, total: int, folder: Path, repeat: str, write: Path | None = None) -> None:
        self._total, self._folder, self._repeat, self._write = total, folder, repeat, write
        self._start = self._last = time.monotonic()
        self._counts: Counter[str] = Counter()

    def seconds(self) -> float:
        """Seconds since the first case."""
        return time.monotonic() - self._start

    def tell(self, outcome: CaseResult) -> None:
        """Counts one outcome."""
        self._counts[outcome.kind] += 1
        number = outcome.case.number
        if outcome.kind == EQUAL and self._write is not None:
            write_case(outcome, self._write)
        if outcome.kind == FAILED:
            print(f"\ncase {number}: {outcome.what}\n{outcome.detail}")
            print(f"    {self._repeat} {number}\n{replay(outcome, self._folder)}", flush=True)
        now, done = time.monotonic(), sum(self._counts.values())
        if now - self._last > 5 or done == self._total:
            self._last = now
            left = self.seconds() / done * (self._total - done)
            told = f"{self._counts[FAILED]} failed, {self._counts[REFUSED]} refused"
            text = f"{done} of {self._total} cases, {told}, {left:.0f} s left"
            print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description="Random runs, each held bit for bit to one rank."
    )
    add = parser.add_argument
    add("--cases", type=int, default=1000, help="how many cases")
    add("--seed", type=int, default=1, help="of the draw")
    add("--first", type=int, default=0, help="number of the first case")
    add("--only", type=int, help="run this case only")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="pools of ranks side by side")
    add("--folder", type=Path, default=Path("runs", "fuzz"), help="for TOML files of failures")
    add("--out", type=Path, help="write the counts to this file, as JSON")
    add("--write", type=Path, help="write the equal cases to this file, with their digests")
    add("--modules", action="store_true", help="small modules instead, held to plain torch, too")
    add("--show", action="store_true", help="print the TOML files and run nothing")
    share = "share of the cases whose mesh or number of ranks changes"
    add("--elastic", type=float, default=0.35, help=share)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line.

    Returns the exit status: 1 if a case failed or too many were refused.
    """
    options = _parser().parse_args(arguments)
    if options.modules:
        prepare()
        return run_modules(options)
    numbers = [options.only]
    if options.only is None:
        numbers = range(options.first, options.first + options.cases)
    cases = [draw(options.seed, number, options.elastic) for number in numbers]
    folder = options.folder / f"seed-{options.seed}"
    if options.show:
        for case in cases:
            print(replay(CaseResult(case, EQUAL), folder))
        return 0
    commit = commit_of_files()
    prepare()  # else every rank would compile at once, within a case's time limit
    repeat = f"python -m tests.fuzz --seed {options.seed} --elastic {options.elastic} --only"
    if options.write is not None:
        options.write.parent.mkdir(parents=True, exist_ok=True)
        options.write.write_text("")
    progress = Progress(len(cases), folder, repeat, options.write)
    outcomes = run_all(cases, options.jobs, progress.tell)
    print(summary(outcomes, progress.seconds()))
    if options.out is not None:
        about = {"seed": options.seed, "elastic": options.elastic, "commit": commit}
        write_counts(options.out, outcomes, about | {"seconds": round(progress.seconds())})
    return 0 if passed(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
