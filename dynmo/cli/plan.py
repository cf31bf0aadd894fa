"""`dynmo plan`: the placement and the schedule for measured costs, what they would take, and what another choice would give."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dynmo.balance.balancers import BALANCERS
from dynmo.cli.compiling import compilation_told
from dynmo.errors import InputError, PartitionError
from dynmo.schedule.bounds import Objective
from dynmo.schedule.catalogue import SCHEDULES

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from dynmo.planner.alternatives import Alternative
    from dynmo.planner.evaluate import Plan

Alternatives = dict[str, "list[Alternative]"]

_BAR = 60  # columns of the longest rank's bar


@compilation_told()
def plan(
    costs: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Costs of the layers (dynmo profile writes them), or a run's folder. Needed.")
    ] = None,
    ranks: Annotated[int | None, typer.Option(metavar="P", help="Pipeline ranks (default: FILE's).")] = None,
    microbatches: Annotated[int | None, typer.Option(metavar="M", help="Microbatches of a step (default: FILE's).")] = None,
    gpus: Annotated[
        int | None, typer.Option(metavar="N", help="Instead: search pipeline x replicas on N GPUs (with --global-batch).")
    ] = None,
    global_batch: Annotated[int | None, typer.Option(metavar="B", help="Sequences of a step, over all replicas.")] = None,
    micro_batch: Annotated[
        str | None, typer.Option(metavar="B1,B2", help="Sizes of microbatches to search (default: near FILE's).")
    ] = None,
    zero: Annotated[int | None, typer.Option(metavar="0|1", help="1: optimizer state divided over the replicas.")] = None,
    bandwidth: Annotated[
        str | None, typer.Option(metavar="BYTES_PER_S", help="Between replicas (default: the slowest link in FILE).")
    ] = None,
    balancer: Annotated[str | None, typer.Option(metavar="NAME", help=f"One of {', '.join(BALANCERS)} (default: exact).")] = None,
    schedule: Annotated[
        str | None, typer.Option(metavar="NAME", help=f"One of {', '.join(SCHEDULES)} (default: FILE's, or zb-h1).")
    ] = None,
    chunks: Annotated[int | None, typer.Option(metavar="V", help="Stages per rank (default: the schedule's own).")] = None,
    memory_limit: Annotated[str | None, typer.Option(metavar="BYTES", help='Most memory of a rank: bytes, or "40GiB".')] = None,
    recompute: Annotated[
        str, typer.Option(metavar="WHICH", help="Layers that run F again in B to save memory: none, auto (as few as must) or all.")
    ] = "none",
    objective: Annotated[Objective, typer.Option(help="What is to be short; makespan where the optimizer is a barrier.")] = Objective.SPAN,
    cost: Annotated[str, typer.Option(metavar="COST", help="What the balancer goes by: time or parameters.")] = "time",
    alternatives: Annotated[bool, typer.Option("--alternatives/--no-alternatives", help="What other choices would give.")] = True,
    megatron: Annotated[bool, typer.Option("--megatron", help="Show the placement as Megatron's layout.")] = False,
    torchtitan: Annotated[bool, typer.Option("--torchtitan", help="Show it as torchtitan's module lists.")] = False,
    deepspeed: Annotated[bool, typer.Option("--deepspeed", help="Show it as DeepSpeed's parts.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Plan placement and schedule for measured layer costs."""
    from dynmo.cli import mesh
    from dynmo.cost.profile_file import read
    from dynmo.planner.alternatives import other_balancers, other_microbatches, other_ranks, other_schedules
    from dynmo.planner.evaluate import Job
    from dynmo.planner.suggest import plan as planned

    if cost not in ("time", "parameters"):
        raise InputError(f"--cost {cost}: choose one of time, parameters (a file of costs goes to --costs)")
    if costs is None:
        raise InputError("--costs is missing: a file of costs (dynmo profile writes one), or a run's folder")
    if recompute not in ("none", "auto", "all"):
        raise InputError(f"--recompute {recompute}: choose one of none, auto, all")
    profile = read(costs)
    wanted = {"megatron": megatron, "torchtitan": torchtitan, "deepspeed": deepspeed}
    words = [word for word, asked in wanted.items() if asked]
    searched = mesh.Options(gpus, global_batch, micro_batch, zero, bandwidth, ranks, microbatches)
    if searched.wanted():
        if cost != "time":
            raise InputError(f"--cost {cost} does not go with --gpus, which compares seconds; leave one of the two out")
        limit = _bytes(memory_limit)
        mesh.run(mesh.request_of(searched, profile, schedule, balancer, chunks, limit, objective, recompute), as_json, words)
        return
    job = Job(
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
    made = planned(job)
    seconds = time.perf_counter() - began
    others: Alternatives = {}
    if alternatives:
        with waiting(as_json):
            others = {
                "balancers": other_balancers(job),
                "schedules": other_schedules(job),
                "microbatches": other_microbatches(job),
                "ranks": other_ranks(job),
            }
    if as_json:
        print(json.dumps(to_json(made, seconds, others), allow_nan=False))
        return
    _print_text(made, seconds, others, words)


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
        raise InputError("--memory-limit 0: a rank needs some memory; leave the option out for no limit")
    return size


def waiting(as_json: bool, what: str = "other choices ...") -> AbstractContextManager[object]:
    """Other plans may take a while. On stderr, and only where someone looks."""
    if as_json:
        return nullcontext()
    from rich.console import Console

    return Console(stderr=True).status(what)


# -- JSON --------------------------------------------------------------------------------------------------------------------------


def to_json(made: Plan, seconds: float, others: Alternatives) -> dict[str, Any]:
    """The contract's words. Seconds and bytes; moves as [layer, from rank, to rank]."""
    timeline, job = made.timeline, made.job
    return {
        "schedule": job.schedule,
        "balancer": job.balancer,
        "ranks": job.ranks,
        "microbatches": job.microbatches,
        "objective": str(job.objective),
        "partition": made.partition.counts,
        "placement": job.placement,
        "stage_cost": made.stage_cost,
        "imbalance": made.imbalance,
        "span": timeline.span,
        "makespan": timeline.makespan,
        "bubble_ratio": timeline.bubble_ratio,
        "idle_ratio": timeline.idle_ratio,
        "lower_bound": made.lower_bound,
        "memory": made.memory,
        "memory_limit": job.memory_limit,
        "recompute": sorted(job.recomputed),
        "moves": made.moves,
        "moved_bytes": made.moved_bytes,
        "seconds": seconds,
        "words": {name: _said(say, made) for name, say in WORDS.items()},
        "alternatives": {kind: [_alternative(other, made) for other in found] for kind, found in others.items()},
    }


def _alternative(other: Alternative, made: Plan) -> dict[str, Any]:
    """gain: the share of the plan's step time that it would save."""
    if other.plan is None:
        return {"choice": other.choice, "problem": other.problem}
    found = other.plan
    return {
        "choice": other.choice,
        "span": found.timeline.span,
        "makespan": found.timeline.makespan,
        "gain": _gain(found, made),
        "imbalance": found.imbalance,
        "bubble_ratio": found.timeline.bubble_ratio,
        "idle_ratio": found.timeline.idle_ratio,
        "memory": found.memory,
        "partition": found.partition.counts,
    }


def _gain(found: Plan, made: Plan) -> float:
    return 1 - found.step / made.step if made.step else 0.0


# -- in the words of other trainers ------------------------------------------------------------------------------------------------


def _megatron(made: Plan) -> dict[str, Any]:
    from dynmo.planner.export import megatron_layout

    layout = megatron_layout(made.job.profile.names, made.partition)
    return {"pipeline_model_parallel_layout": layout.text, "rounded": layout.rounded}


def _torchtitan(made: Plan) -> dict[str, Any]:
    from dynmo.planner.export import torchtitan_modules

    modules = torchtitan_modules(made.job.profile.names, made.partition)
    return {"module_fqns_per_model_part": modules.stages, "rounded": modules.rounded}


def _deepspeed(made: Plan) -> dict[str, Any]:
    from dynmo.planner.export import deepspeed_parts

    return {"parts": deepspeed_parts(made.partition)}


WORDS: dict[str, Callable[[Plan], dict[str, Any]]] = {"megatron": _megatron, "torchtitan": _torchtitan, "deepspeed": _deepspeed}


def _said(say: Callable[[Plan], dict[str, Any]], made: Plan) -> dict[str, Any]:
    """Some placements cannot be said there."""
    try:
        return say(made)
    except PartitionError as error:
        return {"problem": str(error)}


# -- text --------------------------------------------------------------------------------------------------------------------------


def _print_text(made: Plan, seconds: float, others: Alternatives, words: list[str]) -> None:
    from dynmo.report.summary import console_for_tables

    console, job = console_for_tables(), made.job
    limit = "" if job.memory_limit is None else f", at most {show_size(job.memory_limit)} a rank"
    console.print(
        f"{job.schedule} by {job.balancer}: {len(job.layers)} layers, {job.ranks} ranks, {job.microbatches} microbatches{limit}",
        highlight=False,
        markup=False,
    )
    console.print()
    for line in picture(made):
        console.print(line, soft_wrap=True)
    console.print()
    console.print(_figures(made, seconds))
    titles = {
        "balancers": "other balancers",
        "schedules": "other schedules",
        "microbatches": "other microbatches, same global batch",
        "ranks": "other numbers of ranks",
    }
    for kind, found in others.items():
        if found:
            console.print()
            console.print(_table_of(titles[kind], found, made))
            for other in found:
                if other.plan is None:
                    console.print(f"  {other.choice}: {other.problem}", style="dim", highlight=False, markup=False, soft_wrap=True)
    for name in words:
        print_words(console, name, made)


def picture(made: Plan) -> list[Text]:
    """One bar per stage, as long as its work of one microbatch; dots where its rank waits for the longest."""
    from rich.text import Text

    job, ranks = made.job, made.rank_cost
    longest = max(ranks) or 1.0
    several = len(job.placement) > job.ranks
    lines: list[Text] = []
    for rank in range(job.ranks):
        stages = [stage for stage, holder in enumerate(job.placement) if holder == rank]
        for stage in stages:
            cost, own = made.costs.stages[stage], made.partition.range_of(stage)
            line = Text(f"rank {rank:<3} " + (f"stage {stage:<3} " if several else ""))
            used = done = 0
            reached = 0.0
            for letter, seconds, style in (("F", cost.f, "blue"), ("B", cost.b, "green"), ("W", cost.w, "yellow")):
                reached += seconds
                done = round(_BAR * reached / longest)
                line.append(letter * (done - used), style)
                used = done
            idle = round(_BAR * (1 - ranks[rank] / longest)) if stage == stages[-1] else 0
            line.append("." * min(idle, _BAR - used), "dim")
            line.append(" " * (_BAR - used - min(idle, _BAR - used)))
            names = job.profile.names
            line.append(f" {show_time(made.stage_cost[stage]):>8}  {_range(names[own.start], names[own.stop - 1])} ({len(own)})")
            lines.append(line)
    return lines


def _range(first: str, last: str) -> str:
    return first if first == last else f"{first} .. {last}"


def _figures(made: Plan, seconds: float) -> Table:
    from rich.markup import escape
    from rich.table import Table

    timeline, job = made.timeline, made.job
    table = Table(box=None, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    table.add_row("step", show_time(timeline.span), f"{show_time(timeline.makespan)} with an optimizer barrier")
    table.add_row("lower bound", show_time(made.lower_bound), f"of the {job.objective}, for this placement; gap {_gap(made):.2%}")
    table.add_row("bubble, idle", f"{timeline.bubble_ratio:.2%}", f"{timeline.idle_ratio:.2%} idle")
    table.add_row("imbalance", f"{made.imbalance:.3f}", f"the longest rank works {show_time(max(made.rank_cost))} a microbatch")
    if any(made.memory):
        most = max(made.memory)
        limit = "" if job.memory_limit is None else f", {most / job.memory_limit:.0%} of the limit of {show_size(job.memory_limit)}"
        table.add_row("memory", show_size(most), f"on rank {made.memory.index(most)}{limit}")
    since = "the recorded placement" if made.job.profile.partition == job.current.counts else "the even placement"
    if job.recomputed:
        table.add_row("recomputed", str(len(job.recomputed)), escape(", ".join(job.profile.names[i] for i in sorted(job.recomputed))))
    table.add_row("moves", str(len(made.moves)), f"{show_size(made.moved_bytes)} from {since} {'+'.join(map(str, job.current.counts))}")
    table.add_row("planned in", show_time(seconds), "")
    return table


def _gap(made: Plan) -> float:
    return 1 - made.lower_bound / made.step if made.step else 0.0


def _table_of(title: str, found: list[Alternative], made: Plan) -> Table:
    from rich.table import Table

    by_ranks = title == "other numbers of ranks"
    sizes = any(made.memory)
    table = Table(title=title, title_justify="left")
    table.add_column("")
    headings = ["step", "against this", "bubble", "idle", *["memory"] * sizes, *["rank-seconds"] * by_ranks]
    for heading in headings:
        table.add_column(heading, justify="right")
    table.add_column("layers", overflow="fold")
    for other in found:
        if other.plan is None:
            table.add_row(str(other.choice), *["-"] * len(headings), "not possible", style="dim")
            continue
        plan, timeline = other.plan, other.plan.timeline
        row = [show_time(plan.step), f"{plan.step / made.step - 1:+.1%}" if made.step else "-"]
        row += [f"{timeline.bubble_ratio:.1%}", f"{timeline.idle_ratio:.1%}"]
        row += [show_size(max(plan.memory))] * sizes + [show_time(plan.step * plan.job.ranks)] * by_ranks
        table.add_row(str(other.choice), *row, "+".join(map(str, plan.partition.counts)))
    return table


def print_words(console: Console, name: str, made: Plan) -> None:
    console.print()
    for key, value in _said(WORDS[name], made).items():
        if key == "rounded":
            if value:
                cuts = ", ".join(f"{i} and {i + 1}" for i in value)
                console.print(f"  cuts inside a block, moved to its nearer end: between stages {cuts}", highlight=False)
        else:
            text = value if isinstance(value, str) else json.dumps(value)
            console.print(f"{name}: {key} = {text}", highlight=False, markup=False, soft_wrap=True)


def show_time(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if float(f"{seconds * scale:.4g}") >= 1 or unit == "us":
            return f"{seconds * scale:.4g} {unit}"
    raise AssertionError


def show_size(count: int) -> str:
    if count < 1 << 20:
        return f"{count / 1024:.1f} KiB" if count >= 1024 else f"{count} B"
    return f"{count / 2**20:,.1f} MiB" if count < 10 << 30 else f"{count / 2**30:,.1f} GiB"
