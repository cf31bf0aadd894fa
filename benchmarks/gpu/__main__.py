"""`make gpu`: runs every part that needs a GPU, and prints one table.

The parts run one after another. A part that fails or takes too long ends alone. Each part writes
its result file as soon as it has ended, and its output to a log.

Exit status: 0 if every part came out as expected, 1 if one did not. It is 2 if the machine lacks a
package or a GPU, and 130 if interrupted.
"""

from __future__ import annotations

import argparse
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
from benchmarks.gpu.parts import PARTS, Part
from benchmarks.gpu.running import LOGS, ROOT, Ended, run, write

RESULTS = ROOT / "benchmarks" / "results" / "gpu"
SECONDS = 525.0  # all parts together
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
) -> list[tuple[Part, Ended]]:
    """Runs the parts in turn and prints how each ended."""
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
        write(out, part, ended, about, dry)
        rows.append((part, ended))
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
        "--dry",
        action="store_true",
        help="every part on CPU with tiny sizes; results go to a temporary folder",
    )
    parser.add_argument("--only", metavar="NAME[,NAME]", help="these parts only")
    parser.add_argument("--list", action="store_true", help="list the parts and stop")
    parser.add_argument(
        "--seconds",
        type=float,
        default=SECONDS,
        help=f"limit of all parts together (default {SECONDS:.0f})",
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
    if options.list:
        for part in PARTS:
            print(f"{part.name:<10} {part.limit:>4.0f} s  {part.expected}")
        return 0
    try:
        parts = chosen(PARTS, options.only)
        check_packages()
        about = probe(needs_gpu=not options.dry, commit=options.commit)
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
    rows = run_all(parts, out, about, options.dry, options.seconds, options.stretch)
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
