"""`dynmo plan` finds the placement and the schedule for measured costs.

It also shows their time and memory, and those of other choices.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from dynmo.cli import mesh
from dynmo.cli import ranks as fewest
from dynmo.cli.compiling import compilation_told
from dynmo.cli.options import command
from dynmo.cli.plan_options import PlanOptions
from dynmo.cli.plan_output import (
    limit_text,
    picture,
    plan_json,
    print_export,
    show_size,
    show_time,
    waiting,
)
from dynmo.cli.rank_process import import_from_working_folder
from dynmo.schedule.catalogue import AUTO

if TYPE_CHECKING:
    from rich.table import Table

    from dynmo.cost.profile_file import Profile
    from dynmo.plan.alternatives import Alternative
    from dynmo.plan.evaluate import Plan

Alternatives = dict[str, "list[Alternative]"]


@command
@compilation_told()
def plan(options: PlanOptions) -> None:
    from dynmo.cost.profile_file import read

    import_from_working_folder()
    options.check_values()
    costs, tolerance = options.costs_path(), options.fewest_ranks
    if tolerance is not None:
        fewest.check_tolerance(tolerance)
        if costs.suffix == ".toml":
            fewest.run_workload(costs, tolerance, options.as_json)
            return
    profile = read(costs)
    options.check_combination()
    if tolerance is not None:
        fewest.run(*fewest.asked(options, profile), tolerance, options.as_json)
    elif options.gpus is not None:
        mesh.run(*mesh.asked(options, profile), options.as_json, options.exports())
    else:
        _plan_pipeline(options, profile)


def _plan_pipeline(options: PlanOptions, profile: Profile) -> None:
    """Plans one pipeline of given ranks and microbatches, and prints the plan."""
    from dynmo.plan.alternatives import alternatives, choose_schedule, plan_or_suggest
    from dynmo.plan.evaluate import Replica
    from dynmo.plan.problem import Allowed, Problem, Work

    ranks, microbatches = options.pipeline(profile)
    work = Work(options.objective, chunks=options.chunks, cost=options.balanced_cost())
    limits, speeds = options.memory_limits(ranks), options.rank_speeds(ranks)
    problem = Problem(profile, work, limits, speeds)
    mesh = problem.mesh(ranks, microbatches, options.schedule_of(profile))
    balancer, recompute = options.balancer or "exact", options.recompute_mode()
    allowed = Allowed(ranks, mesh.global_batch, balancer=balancer, recompute=recompute)
    began, shapes = time.perf_counter(), list["Alternative"]()
    if mesh.schedule == AUTO:
        best, shapes = choose_schedule(problem, mesh, allowed)
    else:
        if ranks <= len(profile.layers):
            profile.boundaries(Replica(problem, mesh).stage_ranks)  # lists each of them, if any
        best = plan_or_suggest(problem, mesh, allowed)
    seconds = time.perf_counter() - began
    others: Alternatives = {}
    if options.alternatives:
        with waiting(options.as_json):
            others = alternatives(best, allowed)
    if options.as_json:
        record = plan_json(best, balancer, seconds)
        record["alternatives"] = _alternatives_json(others, best)
        if shapes:
            record["shapes"] = [_alternative(shape, best) for shape in shapes]
        print(json.dumps(record, allow_nan=False))
        return
    _print_text(best, balancer, seconds, others, options.exports())
    for line in _shape_lines(best, shapes):
        print(line)


# -- JSON ------------------------------------------------------------------------------------------


def _alternatives_json(others: Alternatives, plan: Plan) -> dict[str, Any]:
    return {
        kind: [_alternative(other, plan) for other in choices] for kind, choices in others.items()
    }


def _alternative(other: Alternative, plan: Plan) -> dict[str, Any]:
    """Returns a choice as JSON.

    `gain` is the share of the plan's step time that it would save.
    """
    if other.plan is None:
        return {"choice": other.choice, "problem": other.problem}
    return {
        "choice": other.choice,
        "span": other.plan.timeline.span,
        "makespan": other.plan.timeline.makespan,
        "gain": _gain(other.plan, plan),
        "imbalance": other.plan.imbalance,
        "bubble_ratio": other.plan.timeline.bubble_ratio,
        "idle_ratio": other.plan.timeline.idle_ratio,
        "memory": other.plan.memory,
        "partition": other.plan.partition.counts,
    }


def _gain(other: Plan, plan: Plan) -> float:
    return 1 - other.step / plan.step if plan.step else 0.0


# -- text ------------------------------------------------------------------------------------------


def _shape_lines(plan: Plan, shapes: Sequence[Alternative]) -> Iterator[str]:
    """Yields which schedule "auto" chose, and how the others did."""
    if shapes:
        yield f"\nauto chose {plan.mesh.schedule}: {show_time(plan.step)}"
    for shape in shapes:
        if shape.plan is None:
            yield f"  {shape.choice}: {shape.problem}"
        elif shape.plan is not plan:
            longer = shape.plan.step / plan.step - 1 if plan.step else 0.0
            yield f"  {shape.choice}: {show_time(shape.plan.step)} ({longer:+.1%})"


_TITLES = {
    "balancers": "other balancers",
    "schedules": "other schedules",
    "microbatches": "other microbatches, same global batch",
    "ranks": "other numbers of ranks",
}


def _print_text(
    plan: Plan, balancer: str, seconds: float, others: Alternatives, exports: list[str]
) -> None:
    from dynmo.cli.console import console_for_tables

    console, mesh = console_for_tables(), plan.mesh
    print(
        f"{mesh.schedule} by {balancer}: {len(plan.layers)} layers, {mesh.pipeline} "
        f"ranks, {mesh.microbatches} microbatches{limit_text(plan.problem.memory_limit)}\n"
    )
    for line in picture(plan):
        console.print(line, soft_wrap=True)
    print()
    console.print(_figures(plan, seconds))
    for kind, choices in others.items():
        if choices:
            print()
            console.print(_table_of(_TITLES[kind], choices, plan))
            for other in choices:
                if other.plan is None:
                    print(f"  {other.choice}: {other.problem}")
    if others:
        print(f"\n{_advice(plan, others['schedules'])}")
    for name in exports:
        print_export(name, plan)


def _advice(plan: Plan, schedules: Sequence[Alternative]) -> str:
    """Returns the best schedule with its step time, and the saving over the plan's or the next."""
    others = [other.plan for other in schedules if other.plan is not None]  # the fastest first
    best, next_best = (others[0], plan) if others and _saves(others[0], plan) else (plan, None)
    if next_best is None and others and _saves(plan, others[0]):
        next_best = others[0]
    line = f"{best.mesh.schedule}: {show_time(best.step)}"
    if next_best is not None:
        saved = 100 * _gain(best, next_best)
        line += f", {saved:.0f} % less than {next_best.mesh.schedule}"
    if max(best.memory) > max(plan.memory):
        line += f", with {show_size(max(best.memory))} instead of {show_size(max(plan.memory))}"
    return line


def _saves(best: Plan, other: Plan) -> bool:
    return _gain(best, other) >= 0.005


def _figures(plan: Plan, seconds: float) -> Table:
    from rich.markup import escape
    from rich.table import Table

    timeline, problem, current = plan.timeline, plan.problem, plan.replica.current
    table = Table(box=None, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    table.add_row(
        "step",
        show_time(timeline.span),
        f"{show_time(timeline.makespan)} with an optimizer barrier",
    )
    table.add_row(
        "lower bound",
        show_time(plan.lower_bound),
        f"of the {problem.work.objective}, for this placement; gap {_gap(plan):.2%}",
    )
    table.add_row("bubble, idle", f"{timeline.bubble_ratio:.2%}", f"{timeline.idle_ratio:.2%} idle")
    table.add_row(
        "imbalance",
        f"{plan.imbalance:.3f}",
        f"the longest rank works {show_time(max(plan.rank_cost))} a microbatch",
    )
    if any(plan.memory):
        limits = plan.replica.limits or (0,) * len(plan.memory)
        shares = [a / b if b else a for a, b in zip(plan.memory, limits, strict=True)]
        rank = shares.index(max(shares))  # the fullest
        limit = (
            ""
            if plan.replica.limits is None
            else f", {shares[rank]:.0%} of the limit of {show_size(limits[rank])}"
        )
        table.add_row("memory", show_size(plan.memory[rank]), f"on rank {rank}{limit}")
    if problem.speeds is not None:
        table.add_row("speeds", ", ".join(f"{each:g}" for each in problem.speeds), "of the ranks")
    since = (
        "the recorded placement"
        if problem.profile.partition == current.counts
        else "the even placement"
    )
    if plan.recomputed:
        table.add_row(
            "recomputed",
            str(len(plan.recomputed)),
            escape(", ".join(problem.profile.names[i] for i in sorted(plan.recomputed))),
        )
    table.add_row(
        "moves",
        str(len(plan.moves)),
        f"{show_size(plan.moved_bytes)} from {since} {'+'.join(map(str, current.counts))}",
    )
    table.add_row("planned in", show_time(seconds), "")
    return table


def _gap(plan: Plan) -> float:
    return 1 - plan.lower_bound / plan.step if plan.step else 0.0


def _table_of(title: str, choices: list[Alternative], plan: Plan) -> Table:
    from rich.table import Table

    by_ranks = title == "other numbers of ranks"
    sizes = any(plan.memory)
    table = Table(title=title, title_justify="left")
    table.add_column("")
    headings = [
        "step",
        "against this",
        "bubble",
        "idle",
        *["memory"] * sizes,
        *["rank-seconds"] * by_ranks,
    ]
    for heading in headings:
        table.add_column(heading, justify="right")
    table.add_column("layers", overflow="fold")
    for other in choices:
        if other.plan is None:
            table.add_row(str(other.choice), *["-"] * len(headings), "not possible", style="dim")
            continue
        timeline = other.plan.timeline
        row = [
            show_time(other.plan.step),
            f"{other.plan.step / plan.step - 1:+.1%}" if plan.step else "-",
        ]
        row += [f"{timeline.bubble_ratio:.1%}", f"{timeline.idle_ratio:.1%}"]
        row += [show_size(max(other.plan.memory))] * sizes + [
            show_time(other.plan.step * other.plan.mesh.pipeline)
        ] * by_ranks
        table.add_row(str(other.choice), *row, "+".join(map(str, other.plan.partition.counts)))
    return table
