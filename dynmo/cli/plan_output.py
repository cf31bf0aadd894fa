"""A plan as JSON, as bars and as layouts of other trainers, for the ways of `dynmo plan`."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from dynmo.cli.placement_formats import FORMATS
from dynmo.errors import PartitionError

if TYPE_CHECKING:
    from rich.text import Text

    from dynmo.plan.evaluate import Plan
    from dynmo.schedule.memory import Limit

_BAR = 60  # columns of the longest rank's bar


def waiting(as_json: bool, what: str = "other choices ...") -> AbstractContextManager[object]:
    """Shows on stderr that other plans may take a while, unless the output is JSON."""
    if as_json:
        return nullcontext()
    from rich.console import Console

    return Console(stderr=True).status(what)


def plan_json(plan: Plan, balancer: str, seconds: float) -> dict[str, Any]:
    """Returns a plan as JSON.

    Times are in seconds, sizes in bytes. A move is [layer, from rank, to rank].
    """
    timeline, mesh, problem = plan.timeline, plan.mesh, plan.problem
    return {
        "schedule": mesh.schedule,
        "balancer": balancer,
        "ranks": mesh.pipeline,
        "microbatches": mesh.microbatches,
        "objective": str(problem.work.objective),
        "partition": plan.partition.counts,
        "placement": plan.stage_ranks,
        "stage_cost": plan.stage_cost,
        "imbalance": plan.imbalance,
        "span": timeline.span,
        "makespan": timeline.makespan,
        "bubble_ratio": timeline.bubble_ratio,
        "idle_ratio": timeline.idle_ratio,
        "lower_bound": plan.lower_bound,
        "memory": plan.memory,
        "memory_limit": problem.memory_limit,
        "speeds": problem.speeds,
        "recompute": sorted(plan.recomputed),
        "moves": plan.moves,
        "moved_bytes": plan.moved_bytes,
        "seconds": seconds,
        "words": {name: _export(name, plan) for name in FORMATS},
    }


def _export(name: str, plan: Plan) -> dict[str, Any]:
    """Returns the plan in another trainer's form, or {"problem": why it has none}."""
    try:
        return FORMATS[name](plan.problem.profile.names, plan.partition)
    except PartitionError as error:
        return {"problem": str(error)}


def picture(plan: Plan) -> list[Text]:
    """Returns one bar per stage, as long as its work of one microbatch.

    Dots show the time in which its rank waits for the longest one.
    """
    from rich.text import Text

    stage_ranks, ranks = plan.stage_ranks, plan.rank_cost
    longest = max(ranks) or 1.0
    several = len(stage_ranks) > len(ranks)
    lines: list[Text] = []
    for rank in range(len(ranks)):
        stages = [stage for stage, holder in enumerate(stage_ranks) if holder == rank]
        for stage in stages:
            cost, own = plan.costs.stages[stage], plan.partition.range_of(stage)
            line = Text(f"rank {rank:<3} " + (f"stage {stage:<3} " if several else ""))
            used = done = 0
            reached = 0.0
            for letter, seconds, style in (
                ("F", cost.f, "blue"),
                ("B", cost.b, "green"),
                ("W", cost.w, "yellow"),
            ):
                reached += seconds
                done = round(_BAR * reached / longest)
                line.append(letter * (done - used), style)
                used = done
            idle = round(_BAR * (1 - ranks[rank] / longest)) if stage == stages[-1] else 0
            line.append("." * min(idle, _BAR - used), "dim")
            line.append(" " * (_BAR - used - min(idle, _BAR - used)))
            names = plan.problem.profile.names
            line.append(
                f" {show_time(plan.stage_cost[stage]):>8}  "
                f"{_range(names[own.start], names[own.stop - 1])} ({len(own)})"
            )
            lines.append(line)
    return lines


def _range(first: str, last: str) -> str:
    return first if first == last else f"{first} .. {last}"


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
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if float(f"{seconds * scale:.4g}") >= 1 or unit == "us":
            return f"{seconds * scale:.4g} {unit}"
    raise AssertionError


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
