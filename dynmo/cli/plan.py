"""`dynmo plan` finds the placement and the schedule for measured costs.

It also shows their time and memory, and those of other choices.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dynmo.balance.balancers import BALANCERS
from dynmo.cli import mesh
from dynmo.cli import ranks as fewest
from dynmo.cli.compiling import compilation_told
from dynmo.cli.show import picture, plan_json, print_export, show_size, show_time, waiting
from dynmo.errors import InputError
from dynmo.schedule.bounds import Objective
from dynmo.schedule.catalogue import SCHEDULES

if TYPE_CHECKING:
    from rich.table import Table

    from dynmo.planner.alternatives import Alternative
    from dynmo.planner.evaluate import Plan

Alternatives = dict[str, "list[Alternative]"]


@compilation_told()
def plan(
    costs: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Costs of the layers (dynmo profile writes them), or a run's folder. Needed.",
        ),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(metavar="P", help="Pipeline ranks (default: FILE's).")
    ] = None,
    microbatches: Annotated[
        int | None, typer.Option(metavar="M", help="Microbatches of a step (default: FILE's).")
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Instead: search pipeline x replicas on N GPUs (with --global-batch)."
        ),
    ] = None,
    global_batch: Annotated[
        int | None, typer.Option(metavar="B", help="Sequences of a step, over all replicas.")
    ] = None,
    micro_batch: Annotated[
        str | None,
        typer.Option(
            metavar="B1,B2", help="Sizes of microbatches to search (default: near FILE's)."
        ),
    ] = None,
    zero: Annotated[
        int | None,
        typer.Option(metavar="0|1", help="1: optimizer state divided over the replicas."),
    ] = None,
    bandwidth: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES_PER_S", help="Between replicas (default: the slowest link in FILE)."
        ),
    ] = None,
    balancer: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=f"One of {', '.join(BALANCERS)} (default: exact)."),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help=f"One of {', '.join(SCHEDULES)} (default: FILE's, or zb-h1)."
        ),
    ] = None,
    chunks: Annotated[
        int | None, typer.Option(metavar="V", help="Stages per rank (default: the schedule's own).")
    ] = None,
    memory_limit: Annotated[
        str | None, typer.Option(metavar="BYTES", help='Most memory of a rank: bytes, or "40GiB".')
    ] = None,
    recompute: Annotated[
        str,
        typer.Option(
            metavar="WHICH",
            help="Layers that run F again in B to save memory: none, auto (as few as must) or all.",
        ),
    ] = "none",
    objective: Annotated[
        Objective,
        typer.Option(help="What is to be short; makespan where the optimizer is a barrier."),
    ] = Objective.SPAN,
    cost: Annotated[
        str, typer.Option(metavar="COST", help="What the balancer goes by: time or parameters.")
    ] = "time",
    fewest_ranks: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            min=0.0,
            help="Instead: compare 1 to P (or N) ranks, and find the fewest on which a step "
            "takes at most this share longer than on all.",
        ),
    ] = None,
    alternatives: Annotated[
        bool,
        typer.Option("--alternatives/--no-alternatives", help="What other choices would give."),
    ] = True,
    megatron: Annotated[
        bool, typer.Option("--megatron", help="Show the placement as Megatron's layout.")
    ] = False,
    torchtitan: Annotated[
        bool, typer.Option("--torchtitan", help="Show it as torchtitan's module lists.")
    ] = False,
    deepspeed: Annotated[
        bool, typer.Option("--deepspeed", help="Show it as DeepSpeed's parts.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Plan placement and schedule for measured layer costs."""
    from dynmo.cost.profile_file import read
    from dynmo.planner.alternatives import (
        other_balancers,
        other_microbatches,
        other_ranks,
        other_schedules,
    )
    from dynmo.planner.evaluate import PlanRequest
    from dynmo.planner.suggest import plan_or_suggest

    if cost not in ("time", "parameters"):
        raise InputError(
            f"--cost {cost}: choose one of time, parameters (a file of costs goes to --costs)"
        )
    if costs is None:
        raise InputError(
            "--costs is missing: a file of costs (dynmo profile writes one), or a run's folder"
        )
    if recompute not in ("none", "auto", "all"):
        raise InputError(f"--recompute {recompute}: choose one of none, auto, all")
    if fewest_ranks is not None:
        fewest.check_tolerance(fewest_ranks)
        if costs.suffix == ".toml":
            fewest.run_workload(costs, fewest_ranks, as_json)
            return
    profile = read(costs)
    wanted = {"megatron": megatron, "torchtitan": torchtitan, "deepspeed": deepspeed}
    exports = [name for name, asked in wanted.items() if asked]
    searched = mesh.Options(gpus, global_batch, micro_batch, zero, bandwidth, ranks, microbatches)
    compared = searched.wanted()
    if cost != "time" and (compared or fewest_ranks is not None):
        option = "--gpus" if compared else "--fewest-ranks"
        raise InputError(
            f"--cost {cost} does not go with {option}, which compares seconds; leave one of the "
            "two out"
        )
    if fewest_ranks is not None:
        if exports:
            raise InputError(
                f"--{exports[0]} does not go with --fewest-ranks, which makes many plans; leave "
                "one of the two out"
            )
        profile = fewest.with_microbatch(profile)
        if not compared:
            counts = (
                _given(ranks, profile.ranks, "--ranks"),
                _given(microbatches, profile.microbatches, "--microbatches"),
            )
            searched, schedule = (
                fewest.pipelines(profile, *counts),
                schedule or profile.schedule or "zb-h1",
            )
    if compared or fewest_ranks is not None:
        limit = _bytes(memory_limit)
        wanted_mesh = mesh.request_of(
            searched, profile, schedule, balancer, chunks, limit, objective, recompute
        )
        if fewest_ranks is None:
            mesh.run(wanted_mesh, as_json, exports)
        else:
            fewest.run(
                wanted_mesh if compared else fewest.of_run(wanted_mesh, costs, ranks, microbatches),
                fewest_ranks,
                as_json,
            )
        return
    request = PlanRequest(
        profile,
        _given(ranks, profile.ranks, "--ranks"),
        _given(microbatches, profile.microbatches, "--microbatches"),
        schedule or profile.schedule or "zb-h1",
        balancer or "exact",
        chunks,
        _bytes(memory_limit),
        objective,
        cost=cost,
        recompute=recompute,
    )
    began = time.perf_counter()
    best = plan_or_suggest(request)
    seconds = time.perf_counter() - began
    others: Alternatives = {}
    if alternatives:
        with waiting(as_json):
            others = {
                "balancers": other_balancers(request),
                "schedules": other_schedules(request),
                "microbatches": other_microbatches(request),
                "ranks": other_ranks(request),
            }
    if as_json:
        print(
            json.dumps(
                plan_json(best, seconds) | {"alternatives": _alternatives_json(others, best)},
                allow_nan=False,
            )
        )
        return
    _print_text(best, seconds, others, exports)


def _given(value: int | None, recorded: int | None, option: str) -> int:
    value = recorded if value is None else value
    if value is None:
        raise InputError(f"{option} is missing, and the costs file does not say it either")
    if value < 1:
        raise InputError(f"{option} {value}: at least 1 is needed")
    return value


def _bytes(text: str | None) -> int | None:
    if text is None:
        return None
    from dynmo.config import parse_bytes

    try:
        size = parse_bytes(text)
    except ValueError as error:
        raise InputError(f"--memory-limit {text}: {error}") from None
    if not size:
        raise InputError(
            "--memory-limit 0: a rank needs some memory; leave the option out for no limit"
        )
    return size


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


def _print_text(plan: Plan, seconds: float, others: Alternatives, exports: list[str]) -> None:
    from dynmo.report.summary import console_for_tables

    console, request = console_for_tables(), plan.request
    limit = (
        ""
        if request.memory_limit is None
        else f", at most {show_size(request.memory_limit)} a rank"
    )
    console.print(
        f"{request.schedule} by {request.balancer}: {len(request.layers)} layers, {request.ranks} "
        f"ranks, {request.microbatches} microbatches{limit}",
        highlight=False,
        markup=False,
    )
    console.print()
    for line in picture(plan):
        console.print(line, soft_wrap=True)
    console.print()
    console.print(_figures(plan, seconds))
    titles = {
        "balancers": "other balancers",
        "schedules": "other schedules",
        "microbatches": "other microbatches, same global batch",
        "ranks": "other numbers of ranks",
    }
    for kind, choices in others.items():
        if choices:
            console.print()
            console.print(_table_of(titles[kind], choices, plan))
            for other in choices:
                if other.plan is None:
                    console.print(
                        f"  {other.choice}: {other.problem}",
                        style="dim",
                        highlight=False,
                        markup=False,
                        soft_wrap=True,
                    )
    for name in exports:
        print_export(console, name, plan)


def _figures(plan: Plan, seconds: float) -> Table:
    from rich.markup import escape
    from rich.table import Table

    timeline, request = plan.timeline, plan.request
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
        f"of the {request.objective}, for this placement; gap {_gap(plan):.2%}",
    )
    table.add_row("bubble, idle", f"{timeline.bubble_ratio:.2%}", f"{timeline.idle_ratio:.2%} idle")
    table.add_row(
        "imbalance",
        f"{plan.imbalance:.3f}",
        f"the longest rank works {show_time(max(plan.rank_cost))} a microbatch",
    )
    if any(plan.memory):
        most = max(plan.memory)
        limit = (
            ""
            if request.memory_limit is None
            else f", {most / request.memory_limit:.0%} of the limit of "
            f"{show_size(request.memory_limit)}"
        )
        table.add_row("memory", show_size(most), f"on rank {plan.memory.index(most)}{limit}")
    since = (
        "the recorded placement"
        if plan.request.profile.partition == request.current.counts
        else "the even placement"
    )
    if request.recomputed:
        table.add_row(
            "recomputed",
            str(len(request.recomputed)),
            escape(", ".join(request.profile.names[i] for i in sorted(request.recomputed))),
        )
    table.add_row(
        "moves",
        str(len(plan.moves)),
        f"{show_size(plan.moved_bytes)} from {since} {'+'.join(map(str, request.current.counts))}",
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
            show_time(other.plan.step * other.plan.request.ranks)
        ] * by_ranks
        table.add_row(str(other.choice), *row, "+".join(map(str, other.plan.partition.counts)))
    return table
