"""A plan as JSON, as bars, as a row of a table and in the formats of other trainers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from dynmo.cli.console import console_for_tables
from dynmo.cli.placement_formats import FORMATS
from dynmo.errors import PartitionError

if TYPE_CHECKING:
    from dynmo.plan.evaluate import Plan
    from dynmo.schedule.memory import Limit

_BAR = 60  # columns of the longest rank's bar


def waiting(as_json: bool, what: str = "other choices ...") -> AbstractContextManager[object]:
    """Shows on stderr that other plans may take a while, unless the output is JSON."""
    if as_json:
        return nullcontext()
    from rich.console import Console

    return Console(stderr=True).status(what)


# -- JSON: times in seconds, sizes in bytes --------------------------------------------------------


def figures(plan: Plan) -> dict[str, Any]:
    """Returns the keys that the plan and each of its alternatives have."""
    times = ("span", "makespan", "bubble_ratio", "idle_ratio")
    return {
        "partition": plan.partition.counts,
        **{key: getattr(plan.timeline, key) for key in times},
        **{key: getattr(plan, key) for key in ("imbalance", "memory")},
        "recompute": sorted(plan.recomputed),
    }


def plan_json(plan: Plan, balancer: str, seconds: float) -> dict[str, Any]:
    """Returns a plan as JSON. A move is [layer, from rank, to rank]."""
    mesh, problem = plan.mesh, plan.problem
    more = ("stage_cost", "lower_bound", "moves", "moved_bytes")
    return {
        "schedule": mesh.schedule,
        "balancer": balancer,
        "ranks": mesh.pipeline,
        "microbatches": mesh.microbatches,
        "objective": str(problem.work.objective),
        **figures(plan),
        "placement": plan.stage_ranks,
        **{key: getattr(plan, key) for key in more},
        "memory_limit": problem.memory_limit,
        "speeds": problem.speeds,
        "seconds": seconds,
        "words": {name: _export(name, plan) for name in FORMATS},
    }


def _export(name: str, plan: Plan) -> dict[str, Any]:
    """Returns the plan in another trainer's form, or {"problem": why it has none}."""
    try:
        return FORMATS[name](plan.problem.profile.names, plan.partition)
    except PartitionError as error:
        return {"problem": str(error)}


# -- text ------------------------------------------------------------------------------------------


def cells(plan: Plan, heading: str, other: Plan) -> dict[str, str]:
    """Returns the cells of a plan in a table. The one of `heading` compares it with another."""
    row = {
        "step": show_time(plan.seconds),
        heading: change(plan.seconds, other.seconds),
        "bubble": f"{plan.timeline.bubble_ratio:.1%}",
        "idle": f"{plan.timeline.idle_ratio:.1%}",
    }
    if any(plan.memory):
        row["memory"] = show_size(max(plan.memory))
    if plan.recomputed:
        row["recomputed"] = str(len(plan.recomputed))
    return row | {"layers": plus(plan.partition.counts)}


def change(seconds: float, other: float) -> str:
    return f"{seconds / other - 1:+.1%}" if other else "-"


def plus(counts: Sequence[int]) -> str:
    return "+".join(map(str, counts))


def print_picture(plan: Plan) -> None:
    """Prints one bar per stage, as long as its work of one microbatch.

    Dots show the time in which its rank waits for the longest one.
    """
    from rich.text import Text

    console, names, holders = console_for_tables(), plan.problem.profile.names, plan.stage_ranks
    longest, several = max(plan.rank_cost) or 1.0, len(holders) > plan.mesh.pipeline
    order = sorted(range(len(holders)), key=lambda stage: (holders[stage], stage))
    for stage, later in zip(order, [*order[1:], None], strict=True):
        rank, own = holders[stage], plan.partition.range_of(stage)
        cost = plan.costs.stages[stage]
        line = Text(f"rank {rank:<3} " + (f"stage {stage:<3} " if several else ""))
        start, reached = len(line), 0.0
        for letter, seconds, style in (
            ("F", cost.f, "blue"),
            ("B", cost.b, "green"),
            ("W", cost.w, "yellow"),
        ):
            reached += seconds
            line.append(letter * (start + round(_BAR * reached / longest) - len(line)), style)
        if later is None or holders[later] != rank:
            idle = round(_BAR * (1 - plan.rank_cost[rank] / longest))
            line.append("." * min(idle, start + _BAR - len(line)), "dim")
        line.pad_right(start + _BAR - len(line))
        first, last = names[own.start], names[own.stop - 1]
        line.append(f" {show_time(plan.stage_cost[stage]):>8}  {first}")
        line.append(f"{'' if len(own) == 1 else f' .. {last}'} ({len(own)})")
        console.print(line, soft_wrap=True)


def print_export(name: str, plan: Plan) -> None:
    """Prints a plan in the form of another trainer."""
    print()
    for key, value in _export(name, plan).items():
        if key != "rounded":
            print(f"{name}: {key} = {value if isinstance(value, str) else json.dumps(value)}")
        elif value:
            cuts = ", ".join(f"{i} and {i + 1}" for i in value)
            print(f"  cuts inside a block, moved to its nearer end: between stages {cuts}")


def show_time(seconds: float) -> str:
    """Returns seconds with a unit, in four digits."""
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if float(f"{seconds * scale:.4g}") >= 1:
            return f"{seconds * scale:.4g} {unit}"
    return f"{seconds * 1e6:.4g} us"


def show_size(count: int) -> str:
    """Returns bytes with a unit."""
    if count < 1 << 20:
        return f"{count / 1024:.1f} KiB" if count >= 1024 else f"{count} B"
    return f"{count / 2**20:,.1f} MiB" if count < 10 << 30 else f"{count / 2**30:,.1f} GiB"


def limit_text(memory_limit: Limit) -> str:
    if memory_limit is None:
        return ""
    limits = (memory_limit,) if isinstance(memory_limit, int) else memory_limit
    return f", at most {', '.join(map(show_size, limits))} a rank"
