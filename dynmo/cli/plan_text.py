"""A plan as text: bars, facts, tables of other plans, and the forms of other trainers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dynmo.cli.output import console_for_tables, print_facts, print_table
from dynmo.cli.placement_formats import FORMATS
from dynmo.errors import PartitionError
from dynmo.report.numbers import plus, show_change, show_share, show_size, show_time

if TYPE_CHECKING:
    from dynmo.plan.alternatives import Alternative, RankRow, RankTable
    from dynmo.plan.best import Found
    from dynmo.plan.evaluate import Plan
    from dynmo.plan.problem import Allowed, Problem
    from dynmo.plan.replay import RanksNeeded
    from dynmo.schedule.memory import Limit

_BAR = 60  # columns of the longest rank's bar


def waiting(as_json: bool, what: str = "other choices ...") -> AbstractContextManager[object]:
    """Shows on stderr that other plans may take a while, unless the output is JSON."""
    if as_json:
        return nullcontext()
    from rich.console import Console

    return Console(stderr=True).status(what)


# -- one plan --------------------------------------------------------------------------------------


def print_plan(plan: Plan, balancer: str, seconds: float) -> None:
    mesh, limit = plan.mesh, limit_text(plan.problem.memory_limit)
    print(
        f"{mesh.schedule} by {balancer}: {len(plan.layers)} layers, {mesh.pipeline} ranks, "
        f"{mesh.microbatches} microbatches{limit}\n"
    )
    print_picture(plan)
    print()
    print_facts([*_facts(plan), ("planned in", show_time(seconds), "")])


def _facts(plan: Plan) -> Iterator[tuple[str, str, str]]:
    """Yields what the plan is like: a word, a number, and what it means."""
    timeline, problem, limits = plan.timeline, plan.problem, plan.replica.limits
    makespan = f"{show_time(timeline.makespan)} with an optimizer barrier"
    yield "step", show_time(timeline.span), makespan
    gap = 1 - plan.lower_bound / plan.step if plan.step else 0.0
    of = f"of the {problem.work.objective}, for this placement; gap {gap:.2%}"
    yield "lower bound", show_time(plan.lower_bound), of
    yield "bubble, idle", f"{timeline.bubble_ratio:.2%}", f"{timeline.idle_ratio:.2%} idle"
    longest = f"the longest rank works {show_time(max(plan.rank_cost))} a microbatch"
    yield "imbalance", f"{plan.imbalance:.3f}", longest
    if any(plan.memory):
        shares = [x / (limits[rank] if limits else 1) for rank, x in enumerate(plan.memory)]
        rank = shares.index(max(shares))  # the fullest
        where = f"on rank {rank}"
        if limits is not None:
            where += f", {shares[rank]:.0%} of the limit of {show_size(limits[rank])}"
        yield "memory", show_size(plan.memory[rank]), where
    if problem.speeds is not None:
        yield "speeds", ", ".join(f"{each:g}" for each in problem.speeds), "of the ranks"
    if plan.recomputed:
        yield "recomputed", str(len(plan.recomputed)), _recomputed(plan)
    current = plan.replica.current.counts
    since = "recorded" if problem.profile.partition == current else "even"
    size = show_size(plan.moved_bytes)
    yield "moves", str(len(plan.moves)), f"{size} from the {since} placement {plus(current)}"


def _recomputed(plan: Plan) -> str:
    return ", ".join(plan.problem.profile.names[layer] for layer in sorted(plan.recomputed))


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


def exported(name: str, plan: Plan) -> dict[str, Any]:
    """Returns the plan in another trainer's form, or {"problem": why it has none}."""
    try:
        return FORMATS[name](plan.problem.profile.names, plan.partition)
    except PartitionError as error:
        return {"problem": str(error)}


def print_export(name: str, plan: Plan) -> None:
    """Prints a plan in the form of another trainer."""
    print()
    for key, value in exported(name, plan).items():
        if key != "rounded":
            print(f"{name}: {key} = {value if isinstance(value, str) else json.dumps(value)}")
        elif value:
            cuts = ", ".join(f"{i} and {i + 1}" for i in value)
            print(f"  cuts inside a block, moved to its nearer end: between stages {cuts}")


# -- others beside it ------------------------------------------------------------------------------


def _cells(plan: Plan, heading: str, other: Plan) -> dict[str, str]:
    """Returns the cells of a plan in a table. The one of `heading` compares it with another."""
    row = {
        "step": show_time(plan.seconds),
        heading: show_change(plan.seconds, other.seconds),
        "bubble": show_share(plan.timeline.bubble_ratio),
        "idle": show_share(plan.timeline.idle_ratio),
    }
    if any(plan.memory):
        row["memory"] = show_size(max(plan.memory))
    if plan.recomputed:
        row["recomputed"] = str(len(plan.recomputed))
    return row | {"layers": plus(plan.partition.counts)}


def print_shapes(plan: Plan, shapes: Sequence[Alternative]) -> None:
    """Prints which schedule "auto" chose, and how the others did."""
    if shapes:
        print(f"\nauto chose {plan.mesh.schedule}: {show_time(plan.step)}")
    for shape in shapes:
        if shape.plan is None:
            print(f"  {shape.choice}: {shape.problem}")
        elif shape.plan is not plan:
            longer = show_change(shape.plan.step, plan.step)
            print(f"  {shape.choice}: {show_time(shape.plan.step)} ({longer})")


_TITLES = {
    "balancers": "other balancers",
    "schedules": "other schedules",
    "microbatches": "other microbatches, same global batch",
    "ranks": "other numbers of ranks",
}


def print_alternatives(plan: Plan, others: dict[str, list[Alternative]]) -> None:
    for kind, choices in others.items():
        if choices:
            print()
            print_table([_row(other, plan, kind) for other in choices], _TITLES[kind])
            for other in choices:
                if other.plan is None:
                    print(f"  {other.choice}: {other.problem}")
    if others:
        print(f"\n{_advice(plan, others['schedules'])}")


def _row(other: Alternative, plan: Plan, kind: str) -> dict[str, str]:
    if other.plan is None:
        return {"": str(other.choice), "layers": "not possible"}
    row = {"": str(other.choice)} | _cells(other.plan, "against this", plan)
    if kind == "ranks":
        row["rank-seconds"] = show_time(other.plan.step * other.plan.mesh.pipeline)
    return row


def _advice(plan: Plan, schedules: Sequence[Alternative]) -> str:
    """Returns the best schedule with its step time, and the saving over the plan's or the next."""
    fastest = next((other.plan for other in schedules if other.plan is not None), plan)
    best, second = (fastest, plan) if gain(fastest, plan) >= _SAVES else (plan, fastest)
    line = f"{best.mesh.schedule}: {show_time(best.step)}"
    if gain(best, second) >= _SAVES:
        line += f", {100 * gain(best, second):.0f} % less than {second.mesh.schedule}"
    if max(best.memory) > max(plan.memory):
        line += f", with {show_size(max(best.memory))} instead of {show_size(max(plan.memory))}"
    return line


_SAVES = 0.005  # the least share of a step that is called a saving


def gain(other: Plan, plan: Plan) -> float:
    """Returns the share of a plan's step time that another one would save."""
    return 1 - other.step / plan.step if plan.step else 0.0


# -- meshes ----------------------------------------------------------------------------------------


def print_meshes(allowed: Allowed, found: Found) -> None:
    best = found.plans[0]
    problem, rate = best.problem, best.samples_per_second
    zero = ", optimizer state divided over the replicas (ZeRO-1)" if problem.work.zero else ""
    limit, rest = limit_text(problem.memory_limit), show_time(best.exposed)
    print(f"{allowed.gpus} GPUs, a global batch of {allowed.batch}{limit}{zero}")
    exposed = f", {rest} of it reductions after the last op" if best.exposed else ""
    speed = f"{rate:,.4g} sequences a second" if math.isfinite(rate) else ""
    print(
        f"best: {best.mesh}, placed by {allowed.balancer}: a step of "
        f"{show_time(best.seconds)}{exposed}; {speed}"
    )
    if math.isinf(problem.bandwidth):
        print(
            "no bandwidth was measured: what replicas sum takes no time here; --bandwidth says "
            "how fast it is"
        )
    if best.recomputed:
        print(f"recomputed in the backward: {len(best.recomputed)} layers: {_recomputed(best)}")
    print()
    print_picture(best)
    print()
    headings = ("ranks", "replicas", "microbatches", "of", "schedule")
    rows = [
        dict(zip(headings, map(str, vars(plan.mesh).values()), strict=True))
        | _cells(plan, "against best", best)
        | {"exposed": show_time(plan.exposed)}
        for plan in found.plans
    ]
    print_table(rows, "candidates")
    if found.slower:
        print(f"{found.slower} more are slower")
    # Why other meshes are refused, with number and nearest mesh per reason.
    kinds: dict[str, list[Any]] = {}
    for x in found.refused:
        kinds.setdefault(next((word for word in _WHY if word in x.reason), ""), []).append(x)
    for refused in kinds.values():
        closest = min(refused, key=lambda x: (x.need or 0, x.mesh.pipeline))
        print(f"{len(refused)} refused, such as {closest.mesh}: {closest.reason}")


_WHY = ("memory", "does not divide", "need at least")


# -- numbers of ranks ------------------------------------------------------------------------------


def print_ranks(problem: Problem, allowed: Allowed, table: RankTable, seconds: float) -> None:
    most, limit = allowed.gpus, limit_text(problem.memory_limit)
    print(f"1 to {most} ranks, a global batch of {allowed.batch}{limit}\n")
    several = len({row.plan.mesh.schedule for row in table.rows if row.plan is not None}) > 1
    print_table([_rank_row(row, table, several) for row in table.rows])
    for row in table.rows:
        if row.plan is None:
            print(f"  {row.ranks}: {row.problem}")
    chosen = table.rows[table.fewest - 1].plan
    assert chosen is not None
    print(
        f"{table.fewest} of {most} ranks are enough: a step of {show_time(chosen.seconds)}, "
        f"{show_time(table.limit_seconds)} are allowed\nsearched in {show_time(seconds)}"
    )


def speed(plan: Plan, table: RankTable) -> float:
    """Returns how fast a step is against one on all ranks."""
    return table.full_seconds / plan.seconds if plan.seconds else 1.0


def _rank_row(row: RankRow, table: RankTable, several_schedules: bool) -> dict[str, str]:
    plan, best = row.plan, row.retuned
    out = {"": "fewest" if row.ranks == table.fewest else "", "ranks": str(row.ranks)}
    if plan is None:
        out["layers"] = "not possible"
    else:
        mesh, rate = plan.mesh, plan.samples_per_second / row.ranks
        out |= {
            "mesh": f"{mesh.pipeline} x {mesh.replicas}",
            "microbatches": f"{mesh.microbatches} of {mesh.micro_batch}",
            **({"schedule": mesh.schedule} if several_schedules else {}),
            "step": show_time(plan.seconds),
            "speed": f"{speed(plan, table):.1%}",
            "sequences/s per rank": f"{rate:,.4g}" if math.isfinite(rate) else "-",
            **({"memory": show_size(max(plan.memory))} if any(plan.memory) else {}),
            "layers": plus(plan.partition.counts),
        }
    if best is not None:
        size = best.mesh.micro_batch
        out["best micro_batch"] = str(size)
        if plan is not None and size != plan.mesh.micro_batch:
            out["best micro_batch"] += f" ({show_change(best.seconds, plan.seconds)})"
    return out


def needed_json(needed: tuple[RanksNeeded, ...]) -> dict[str, Any]:
    """Returns the key `ranks_needed`, if it was asked for."""
    from dynmo.plan.replay import mean_ranks

    if not needed:
        return {}
    moments = [asdict(row) for row in needed]
    return {"ranks_needed": {"moments": moments, "mean": mean_ranks(needed)}}


def print_needed(needed: tuple[RanksNeeded, ...], ranks: int) -> None:
    """Prints the ranks that a workload needs: one row for each moment, and the mean."""
    from dynmo.plan.replay import mean_ranks

    print()
    print_table(
        [
            {
                "steps": f"{row.first}-{row.last}",
                "ranks": str(row.ranks),
                "s/step": f"{row.seconds:.4g}",
                "layers": plus(row.layers),
            }
            for row in needed
        ]
    )
    print(f"needs {mean_ranks(needed):.1f} of {ranks} ranks on average")


# -- numbers ---------------------------------------------------------------------------------------


def limit_text(memory_limit: Limit) -> str:
    if memory_limit is None:
        return ""
    limits = (memory_limit,) if isinstance(memory_limit, int) else memory_limit
    return f", at most {', '.join(map(show_size, limits))} a rank"
