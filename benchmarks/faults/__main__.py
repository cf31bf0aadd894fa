"""The fault fuzzer: `python -m benchmarks.faults --draws 1000 --seed 7`.

Each draw is a small run of 2 to 4 ranks with a fault, half of them in a drawn phase and half at a
drawn time. It must end with the digest of the same run without a fault. After a NaN this is the
digest of one rank that leaves the step out. Or the run ends with one line and status 1, and goes on
from its checkpoint to that digest. It may neither hang, nor show a traceback, nor leave a process.

live        the others went on, in the same processes
unharmed    nobody had to recover
restarted   the launcher started the run again
line        the run ended with one line, and `--resume` reached the digest

Seconds are medians, from the fault on. The second table has in each cell the seconds until it was
noticed and until the next step, and the steps that were repeated.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

from benchmarks.faults import hosts
from benchmarks.faults.draws import Draw, draw
from benchmarks.faults.judge import Server, Workplace
from benchmarks.faults.tables import FAILED, LIVE, UNHARMED, counts, summary, tables
from benchmarks.output import add_number, machine, parser_of, print_tables


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    add_number(parser, "draws", 1000, "number of draws")
    add_number(parser, "seed", 1, "seed of all draws")
    add_number(parser, "first", 0, "number of the first draw")
    add_number(parser, "jobs", 1, "draws at once")
    parser.add_argument("--only", type=int, metavar="DRAW", help="one draw of the seed")
    text = "takes a line for each draw; those that are there are not drawn again"
    parser.add_argument("--log", type=Path, metavar="FILE", help=text)
    text = "figures of such files, instead of measuring"
    parser.add_argument("--read", type=Path, nargs="+", metavar="FILE", help=text)
    parser.add_argument("--folder", type=Path, help="keeps the runs that failed")
    return parser


def _left_out() -> dict[str, str]:
    """Returns the kinds of faults that this machine cannot make, and why."""
    network = hosts.why_not()
    kinds = {"cut network": network, "slow network": network}
    if network == "needs root":
        kinds["full disk"] = network
    return {kind: why for kind, why in kinds.items() if why}


class Fuzzer:
    """Draws faults, so many at once."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._lock = options, Lock()
        self._rows: list[dict[str, Any]] = []
        if options.log is not None and options.log.exists():
            self._rows += read_rows([options.log])
        self._left_out = _left_out()
        for kind, why in self._left_out.items():
            print(f"left out: {kind} ({why})", file=sys.stderr)
        name = tempfile.mkdtemp(prefix="dynmo-faults-") if options.folder is None else ""
        self._folder = options.folder or Path(name)
        self._folder.mkdir(parents=True, exist_ok=True)

    def run(self) -> list[dict[str, Any]]:
        options = self._options
        numbers = range(options.first, options.first + options.draws)
        if options.only is not None:
            numbers = range(options.only, options.only + 1)
        known = {row["number"] for row in self._rows}
        left = iter([number for number in numbers if number not in known])
        self._total, self._start, self._new = len(numbers), time.monotonic(), 0
        servers = [Server() for _ in range(options.jobs)]
        try:
            places = [Workplace(server, self._folder, at) for at, server in enumerate(servers)]
            with ThreadPoolExecutor(len(places)) as pool:
                for done in [pool.submit(self._work, place, left) for place in places]:
                    done.result()
        finally:
            for server in servers:
                server.close()
        return self._rows

    def _work(self, place: Workplace, left: Iterator[int]) -> None:
        while True:
            with self._lock:
                number = next(left, None)
            if number is None:
                return
            drawn = draw(self._options.seed, number, place.length, tuple(self._left_out))
            row = {"seed": self._options.seed, "what": str(drawn)} | place.judge(drawn)
            with self._lock:
                self._take(drawn, row)

    def _take(self, drawn: Draw, row: dict[str, Any]) -> None:
        self._rows.append(row)
        self._new += 1
        if self._options.log is not None:
            with self._options.log.open("a") as log:
                print(json.dumps(row), file=log)
        failed = sum(each["how"] == FAILED for each in self._rows)
        counted = [each for each in self._rows if counts(each)]
        live = sum(each["how"] in (LIVE, UNHARMED) for each in counted)
        seconds = time.monotonic() - self._start
        print(
            f"[{len(self._rows)}/{self._total}] {row['how']:9} {drawn} ({row['seconds']:.1f} s; "
            f"{failed} failed, {live} of {len(counted)} live, {seconds / self._new:.1f} s a draw)",
            file=sys.stderr,
        )
        if row["how"] == FAILED:
            print(f"    {row['problem']}\n    {row['folder']}", file=sys.stderr)


def read_rows(files: list[Path]) -> list[dict[str, Any]]:
    """Returns the rows of some logs. The last row of a draw counts."""
    lines = [line for file in files for line in file.read_text().splitlines()]
    rows = [json.loads(line) for line in lines]
    return list({(row["seed"], row["number"]): row for row in rows}.values())


def show(figures: dict[str, Any]) -> None:
    print_tables(tables(figures))
    share, counted = figures["live_share"], figures["kills_and_stops"]
    if share is not None:
        print(f"kills and stops of one rank after the first step: {counted}, {share:.1%} live")
    failed = figures["failed"]
    print(f"{figures['draws']} draws of seed {figures['seeds']}, {len(failed)} failed: {failed}")


def main() -> int:
    options = _parser().parse_args()
    print(f"seed {options.seed}", file=sys.stderr)
    rows = read_rows(options.read) if options.read else Fuzzer(options).run()
    seeds = sorted({row["seed"] for row in rows})
    figures = {"seeds": seeds, **summary(rows), "machine": machine()}
    if options.json:
        print(json.dumps(figures))
    else:
        show(figures)
    return 1 if figures["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
