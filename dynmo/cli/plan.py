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
from dynmo.cli.console import print_table
from dynmo.cli.options import command
from dynmo.cli.plan_options import PlanOptions
from dynmo.cli.plan_output import (
    cells,
    change,
    figures,
    limit_text,
    plan_json,
    plus,
    print_export,
    print_picture,
    show_size,
    show_time,
    waiting,
)
from dynmo.cli.rank_process import import_from_working_folder
from dynmo.schedule.catalogue import AUTO

if TYPE_CHECKING:
    from dynmo.cost.costs_file import Profile
    from dynmo.plan.alternatives import Alternative
    from dynmo.plan.evaluate import Plan


@command
@compilation_told()
def plan(options: PlanOptions) -> None:
    from dynmo.cost.costs_file import read

    import_from_working_folder()
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
    work = Work(options.objective, chunks=options.chunks, cost=options.cost)
    limits, speeds = options.memory_limits(ranks), options.rank_speeds(ranks)
    problem = Problem(profile, work, limits, speeds)
    mesh = problem.mesh(ranks, microbatches, options.schedule_of(profile))
    balancer, recompute = options.balancer or "exact", options.recompute
    allowed = Allowed(ranks, mesh.global_batch, balancer=balancer, recompute=recompute)
    began, shapes = time.perf_counter(), list["Alternative"]()
    if mesh.schedule == AUTO:
        best, shapes = choose_schedule(problem, mesh, allowed)
    else:
        if ranks <= len(profile.layers):
            profile.boundaries(Replica(problem, mesh).stage_ranks)  # lists each of them, if any
        best = plan_or_suggest(problem, mesh, allowed)
    seconds = time.perf_counter() - began
    others = dict[str, list["Alternative"]]()
    if options.alternatives:
        with waiting(options.as_json):
            others = alternatives(best, allowed)
    if options.as_json:
        record = plan_json(best, balancer, seconds)
        lists = {kind: [_alternative(x, best) for x in found] for kind, found in others.items()}
        record["alternatives"] = lists
        if shapes:
            record["shapes"] = [_alternative(shape, best) for shape in shapes]
        print(json.dumps(record, allow_nan=False))
        return
    print(
        f"{best.mesh.schedule} by {balancer}: {len(best.layers)} layers, {ranks} ranks, "
        f"{best.mesh.microbatches} microbatches{limit_text(limits)}\n"
    )
    print_picture(best)
    print()
    _print_facts([*_facts(best), ("planned in", show_time(seconds), "")])
    _print_alternatives(best, others)
    for name in options.exports():
        print_export(name, best)
    _print_shapes(best, shapes)


def _alternative(other: Alternative, plan: Plan) -> dict[str, Any]:
    """Returns a choice as JSON.

    `gain` is the share of the plan's step time that it would save.
    """
    if other.plan is None:
        return {"choice": other.choice, "problem": other.problem}
    return {"choice": other.choice, "gain": _gain(other.plan, plan)} | figures(other.plan)


def _gain(other: Plan, plan: Plan) -> float:
    return 1 - other.step / plan.step if plan.step else 0.0


# -- text ------------------------------------------------------------------------------------------


def _print_shapes(plan: Plan, shapes: Sequence[Alternative]) -> None:
    """Prints which schedule "auto" chose, and how the others did."""
    if shapes:
        print(f"\nauto chose {plan.mesh.schedule}: {show_time(plan.step)}")
    for shape in shapes:
        if shape.plan is None:
            print(f"  {shape.choice}: {shape.problem}")
        elif shape.plan is not plan:
            longer = change(shape.plan.step, plan.step)
            print(f"  {shape.choice}: {show_time(shape.plan.step)} ({longer})")


_TITLES = {
    "balancers": "other balancers",
    "schedules": "other schedules",
    "microbatches": "other microbatches, same global batch",
    "ranks": "other numbers of ranks",
}


def _print_alternatives(plan: Plan, others: dict[str, list[Alternative]]) -> None:
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
    row = {"": str(other.choice)} | cells(other.plan, "against this", plan)
    if kind == "ranks":
        row["rank-seconds"] = show_time(other.plan.step * other.plan.mesh.pipeline)
    return row


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
        names = [problem.profile.names[i] for i in sorted(plan.recomputed)]
        yield "recomputed", str(len(names)), ", ".join(names)
    current = plan.replica.current.counts
    since = "recorded" if problem.profile.partition == current else "even"
    size = show_size(plan.moved_bytes)
    yield "moves", str(len(plan.moves)), f"{size} from the {since} placement {plus(current)}"


def _print_facts(facts: Sequence[tuple[str, str, str]]) -> None:
    first, second = (max(len(fact[column]) for fact in facts) for column in (0, 1))
    for word, number, meaning in facts:
        print(f" {word:<{first}}  {number:>{second}}  {meaning}".rstrip())
