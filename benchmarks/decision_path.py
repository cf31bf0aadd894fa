"""The way of a decision through the code, and its seconds.

One decision on the placement and one on the number of ranks of four ranks are asked again, as
`tests/fixtures` recorded them. `sys.setprofile` sees every call from one module of `dynmo.plan` to
another. Fields, properties and constructors of records are read, not called.

modules, crossings    Modules that the decision itself enters, and the pairs of functions that call
                      one another across. Its doors are `evaluate`, `search` and a balancer: what
                      lies behind them is not looked at.
everything            The same with what lies behind.
seconds               The fastest of some decisions, warm.

python -m benchmarks.decision_path
"""

from __future__ import annotations

import gzip
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

from benchmarks.output import parser_of, run
from dynmo.plan import balancers, best, evaluate
from tests.plan.old_records import question

DOORS = {evaluate.evaluate.__code__, best.search.__code__, best.least_seconds.__code__}
RECORDS = Path(__file__).parents[1] / "tests" / "fixtures" / "decisions.jsonl.gz"
KINDS = {"move": "placement", "ranks": "ranks"}
ROUNDS = 5


def traced(call: Callable[[], object], doors: set[CodeType]) -> tuple[set[str], set[str]]:
    """Returns the modules of the package that a call enters, and the calls between them."""
    fields = properties()
    modules, crossings, closed = set[str](), set[str](), list[FrameType]()

    def watch(frame: FrameType, event: str, _: object) -> None:
        if event == "return" and closed and closed[-1] is frame:
            closed.pop()
        if event != "call" or closed:
            return
        name = frame.f_globals.get("__name__", "")
        if not name.startswith("dynmo.plan.") or frame.f_code in fields:
            return
        if frame.f_code.co_filename == "<string>":  # what dataclasses write
            return
        before = frame.f_back
        if before is not None and before.f_globals.get("__name__") != name:
            modules.add(name)
            crossings.add(f"{before.f_code.co_qualname} > {frame.f_code.co_qualname}")
        if frame.f_code in doors:
            closed.append(frame)

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return modules, crossings


def properties() -> set[CodeType]:
    """Returns the code of all properties of the package's classes."""
    found = set[CodeType]()
    for name, module in list(sys.modules.items()):
        if name.startswith("dynmo.plan."):
            for each in (x for kind in vars(module).values() for x in getattr(kind, "__mro__", ())):
                for value in vars(each).values():
                    get = getattr(value, "fget", None) or getattr(value, "func", None)
                    if isinstance(get, FunctionType):
                        found.add(get.__code__)
    return found


def measure(_: object) -> dict[str, Any]:
    rows = [
        json.loads(line)["record"] for line in gzip.decompress(RECORDS.read_bytes()).splitlines()
    ]
    found: dict[str, Any] = {}
    for kind, name in KINDS.items():
        record = next(
            row
            for row in rows
            if row["kind"] == kind
            and row["situation"]["mesh"]["pipeline"] == 4
            and row["answer"].get("move")
        )
        ask = question(record)
        balance = balancers.balancer(ask.rules.balance.balancer)
        seconds = list[float]()
        for _ in range(ROUNDS):
            begun = time.perf_counter()
            ask.again()
            seconds.append(time.perf_counter() - begun)
        modules, crossings = traced(ask.again, DOORS | {balance.__code__})
        inside, pairs = traced(ask.again, set())
        found[name] = {
            "modules": sorted(modules),
            "crossings": len(crossings),
            "all_modules": len(inside),
            "all_pairs": len(pairs),
            "seconds": min(seconds),
        }
    return found


def show(result: dict[str, Any]) -> None:
    for name in KINDS.values():
        row = result[name]
        print(
            f"{name}: {len(row['modules'])} modules, {row['crossings']} crossings "
            f"({', '.join(x.removeprefix('dynmo.plan.') for x in row['modules'])}); everything: "
            f"{row['all_modules']} modules, {row['all_pairs']} pairs; {row['seconds']:.3f} s"
        )


if __name__ == "__main__":
    run(parser_of(__doc__), measure, show)
