"""`make gpu`: runs every part that needs a GPU, and prints one table.

The parts run one after another. A part that fails or takes too long ends alone. Each part writes
its result file as soon as it has ended, and its output to a log. `--several` runs the parts that
need two GPUs or more, and writes one file, `several.json`.

Exit status: 0 if every part came out as expected, 1 if one did not. It is 2 if the machine lacks a
package or a GPU, and 130 if interrupted.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.gpu.checks import Unfit, check_packages, installed, probe
from benchmarks.gpu.parts import PARTS, SEVERAL, Part
from benchmarks.gpu.running import LOGS, ROOT, Ended, record, run, write

RESULTS = ROOT / "benchmarks" / "results" / "gpu"
SECONDS = 525.0  # all parts together
SECONDS_OF_SEVERAL = 590.0
DRY_LIMIT = 120.0  # seconds of a part in a dry run: a shared machine may be busy


def chosen(parts: Sequence[Part], only: str | None) -> list[Part]:
    """Returns the parts named in `only`, in their own order."""
    names = None if only is None else only.split(",")
    unknown = next(
        (name for name in names or () if name not in {part.name for part in parts}), None
    )
    if unknown is not None:
        raise Unfit(
            f"--only: there is no part {unknown!r}; "
            f"choose from {', '.join(part.name for part in parts)}"
        )
    return [part for part in parts if names is None or part.name in names]


def run_all(
    parts: Sequence[Part],
    out: Path,
    about: Mapping[str, Any],
    dry: bool,
    seconds: float,
    stretch: float = 1.0,
    file: str | None = None,
) -> list[tuple[Part, Ended]]:
    """Runs the parts in turn and prints how each ended. With `file` all write to that file."""
    (out / LOGS).mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + seconds
    rows: list[tuple[Part, Ended]] = []
    for number, part in enumerate(parts, 1):
        head = f"[{number}/{len(parts)}] {part.name}"
        lacking = [] if dry else [name for name in part.needs if not installed(name)]
        limit = min(
            max(part.limit, DRY_LIMIT) if dry else stretch * part.limit, deadline - time.monotonic()
        )
        print(f"{head}: starts, limit {max(0.0, limit):.0f} s", flush=True)
        try:
            if lacking:
                ended = Ended("left out", f"missing package: {', '.join(lacking)}")
            elif limit <= 0:
                ended = Ended("left out", f"the {seconds:.0f} s of all parts are over")
            else:
                command = [word.format(out=out) for word in (part.dry if dry else part.command)]
                ended = run(
                    command,
                    limit,
                    out / LOGS / f"{part.name}.log",
                    {"OMP_NUM_THREADS": "1"} if dry else None,
                )
        except KeyboardInterrupt:
            print(f"{head}: interrupted", flush=True)
            break
        rows.append((part, ended))
        machine = {"dry": dry, "machine": dict(about)}
        if file is None:
            write(out / f"{part.name}.json", record(part, ended) | machine)
        else:
            write(out / file, machine | {"parts": [record(*row) for row in rows]})
        print(f"{head}: {ended.status} in {ended.seconds:.1f} s: {ended.came}", flush=True)
    return rows


def show(rows: Sequence[tuple[Part, Ended]]) -> None:
    """Prints the table of all parts."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for heading in ("part", "expected", "what came", "seconds", "status"):
        table.add_column(heading, justify="right" if heading == "seconds" else "left")
    for part, ended in rows:
        table.add_row(
            part.name, part.expected, Text(ended.came), f"{ended.seconds:.1f}", ended.status
        )
    console = Console()
    console = console if console.is_terminal else Console(width=160)
    console.print(table)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--several", action="store_true", help="the parts that need two GPUs or more"
    )
    parser.add_argument(
        "--dry",
        action="store_true",
        default=bool(os.environ.get("DRY")),
        help="every part on CPU with tiny sizes; results go to a temporary folder (also: DRY=1)",
    )
    parser.add_argument("--only", metavar="NAME[,NAME]", help="these parts only")
    parser.add_argument("--list", action="store_true", help="list the parts and stop")
    parser.add_argument(
        "--seconds",
        type=float,
        help="limit of all parts together "
        f"(default {SECONDS:.0f}, with --several {SECONDS_OF_SEVERAL:.0f})",
    )
    parser.add_argument(
        "--stretch",
        type=float,
        default=1.0,
        metavar="FACTOR",
        help="multiply each part's limit, for a slow machine",
    )
    parser.add_argument(
        "--out", type=Path, help=f"folder of the results (default {RESULTS.relative_to(ROOT)})"
    )
    parser.add_argument(
        "--commit", metavar="HASH", help="the commit to name in the results of a copy without .git"
    )
    return parser.parse_args()


def main() -> int:
    """Runs the command and returns its exit status."""
    options = _options()
    known = SEVERAL if options.several else PARTS
    if options.list:
        for part in known:
            print(f"{part.name:<10} {part.limit:>4.0f} s  {part.expected}")
        return 0
    try:
        parts = chosen(known, options.only)
        check_packages()
        least = 0 if options.dry else 2 if options.several else 1
        about = probe(least, commit=options.commit)
    except Unfit as error:
        print(f"benchmarks.gpu: {error}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGINT, _interrupt)
    temporary = (
        Path(tempfile.mkdtemp(prefix="dynmo-gpu-")) if options.dry and options.out is None else None
    )
    out = (temporary or options.out or RESULTS).resolve()
    print(
        f"{about.get('gpu', 'CPU')}, torch {about['torch']}, CUDA {about['cuda']}, "
        f"driver {about['driver']}, Python {about['python']}"
    )
    seconds = options.seconds or (SECONDS_OF_SEVERAL if options.several else SECONDS)
    file = "several.json" if options.several else None
    rows = run_all(parts, out, about, options.dry, seconds, options.stretch, file)
    show(rows)
    passed = all(ended.status == "ok" for _, ended in rows)
    if temporary is not None and passed:
        shutil.rmtree(temporary)
    else:
        print(f"results in {out}, logs in {out / LOGS}")
    if len(rows) < len(parts):
        return 130
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
