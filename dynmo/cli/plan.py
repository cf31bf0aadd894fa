"""`dynmo plan` finds the placement and the schedule for measured costs.

It plans one pipeline, searches a mesh of `--gpus`, or compares 1 to all ranks (`--fewest-ranks`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field

from dynmo.cli import plan_text as text
from dynmo.cli.options import CommandOptions, command, like
from dynmo.cli.output import compilation_told, print_json
from dynmo.cli.placement_formats import FORMATS
from dynmo.cli.rank_process import import_from_working_folder
from dynmo.errors import InputError
from dynmo.options import Count, MemoryLimit, NonNegative, Positive, parse_bytes
from dynmo.plan.options import Balance, Balancer
from dynmo.plan.partition import Cost
from dynmo.plan.problem import Allowed, Problem, RecomputeMode, Work
from dynmo.report.numbers import show_time
from dynmo.schedule.bounds import Objective
from dynmo.schedule.catalogue import AUTO, SHAPES, ScheduleName

if TYPE_CHECKING:
    from dynmo.cost.costs_file import Profile
    from dynmo.plan.alternatives import Alternative, RankRow, RankTable
    from dynmo.plan.evaluate import Plan


def _rate(value: str) -> float:
    with suppress(ValueError):
        return float(value)
    return float(parse_bytes(value))


class PlanOptions(CommandOptions):
    costs: Path | None = None
    """Costs of the layers (dynmo profile writes them), or a run's folder. Needed."""
    ranks: Count | None = None
    """Pipeline ranks (default: as measured)."""
    microbatches: Count | None = None
    """Microbatches of a step (default: as measured)."""
    gpus: Count | None = None
    """Instead: search pipeline x replicas on N GPUs (with --global-batch)."""
    global_batch: Count | None = None
    """Sequences of a step, over all replicas."""
    micro_batch: tuple[Count, ...] = ()
    """Sizes of microbatches to search, such as 1,2,4 (default: near the measured one)."""
    zero: Annotated[int, Field(ge=0, le=1)] = 0
    """1: optimizer state divided over the replicas."""
    bandwidth: Annotated[float, BeforeValidator(_rate), Field(gt=0)] | None = None
    """Bytes per second between replicas, such as 25e9 or 40GiB (default: the slowest
    measured link)."""
    balancer: Balancer = like(Balance, "balancer")
    schedule: ScheduleName | None = None
    """Order of F, B and W on each rank (default: as measured, or zb-auto)."""
    chunks: Count | None = None
    """Stages per rank (default: the schedule's own)."""
    memory_limit: MemoryLimit = None
    """Most memory of a rank: bytes, or "40GiB". One for all, or "24GiB,16GiB"."""
    speeds: tuple[Positive, ...] | None = None
    """Speed of each rank, such as 1,0.5 (default: all are 1)."""
    recompute: RecomputeMode = "none"
    """Layers that run F again in B to save memory: none, auto (as few as must) or all."""
    objective: Objective = Objective.SPAN
    """Time to keep short: span, or makespan if the optimizer is a barrier."""
    cost: Cost = like(Balance, "cost")
    fewest_ranks: NonNegative | None = None
    """Instead: compare 1 to all ranks, and find the fewest on which a step takes at most this
    share longer than on all."""
    alternatives: bool = True
    """Show what other choices would give."""
    megatron: bool = False
    """Show the placement as Megatron's layout."""
    torchtitan: bool = False
    """Show it as torchtitan's module lists."""
    deepspeed: bool = False
    """Show it as DeepSpeed's parts."""

    def _problems(self) -> Iterator[str]:
        given = self.model_fields_set
        if self.costs is None:
            yield (
                "--costs is missing: a file of costs (dynmo profile writes one), or a run's folder"
            )
        if self.gpus is None:
            for key in sorted(given & {"global_batch", "micro_batch", "zero", "bandwidth"}):
                option = key.replace("_", "-")
                yield f"--{option} goes with --gpus, which searches the mesh; add --gpus N"
        elif self.global_batch is None:
            yield "--gpus needs --global-batch: how many sequences a step takes, over all replicas"
        single = {"cost", "speeds", *["memory_limit"] * isinstance(self.memory_limit, tuple)}
        searches = {"gpus": {"ranks", "microbatches"} | single, "fewest_ranks": {*FORMATS} | single}
        for search, excluded in searches.items():
            for key in sorted(excluded & given) if search in given else ():
                options = f"--{key} and --{search}".replace("_", "-")
                yield f"{options} exclude each other; leave one of the two out"

    @property
    def exports(self) -> list[str]:
        """The trainers in whose form the plan is wanted."""
        return [name for name in FORMATS if getattr(self, name)]


@command
@compilation_told()
def plan(options: PlanOptions) -> None:
    from dynmo.cost.costs_file import read

    import_from_working_folder()
    assert options.costs is not None
    if options.fewest_ranks is not None and options.costs.suffix == ".toml":
        _needed_by_workload(options.costs, options.fewest_ranks, options.as_json)
        return
    profile = read(options.costs)
    if options.fewest_ranks is not None:
        _compare_ranks(options, profile, options.fewest_ranks)
    elif options.gpus is not None:
        _search_mesh(options, profile)
    else:
        _plan_pipeline(options, profile)


def _asked(options: PlanOptions, profile: Profile) -> tuple[Problem, Allowed]:
    """Returns what is known, and the meshes that a search may choose.

    Without `--gpus` they are those of one pipeline with microbatches of the measured size. Sums
    over replicas take no time if no link was measured.
    """
    work = Work(options.objective, chunks=options.chunks, zero=options.zero, cost=options.cost)
    links = (link.bytes_per_second for _, link in profile.links)
    bandwidth = options.bandwidth or min(links, default=math.inf)
    problem = Problem(profile, work, options.memory_limit, options.speeds, bandwidth)
    gpus, batch, sizes = options.gpus, options.global_batch, options.micro_batch
    schedule = options.schedule
    if gpus is None or batch is None:
        gpus = options.ranks or profile.ranks
        microbatches = options.microbatches or profile.microbatches
        if gpus is None or microbatches is None:
            missing = "ranks" if gpus is None else "microbatches"
            raise InputError(f"--{missing} is missing, and the costs file does not say it either")
        batch, sizes = problem.size * microbatches, (problem.size,)
        schedule = schedule or profile.schedule or "zb-auto"
    schedules = SHAPES if schedule == AUTO else () if schedule is None else (schedule,)
    return problem, Allowed(
        gpus,
        batch,
        sizes,
        schedules,
        balancer=options.balancer,
        recompute=options.recompute,
    )


# -- one pipeline ----------------------------------------------------------------------------------


def _plan_pipeline(options: PlanOptions, profile: Profile) -> None:
    from dynmo.plan.alternatives import alternatives, choose_schedule, plan_or_suggest
    from dynmo.plan.evaluate import Replica

    problem, allowed = _asked(options, profile)
    ranks, microbatches = allowed.gpus, allowed.batch // problem.size
    is_auto = allowed.schedules == SHAPES
    mesh = problem.mesh(ranks, microbatches, AUTO if is_auto else allowed.schedules[0])
    began, shapes = time.perf_counter(), list["Alternative"]()
    if is_auto:
        best, shapes = choose_schedule(problem, mesh, allowed)
    else:
        if ranks <= len(profile.layers):
            profile.boundaries(Replica(problem, mesh).stage_ranks)  # lists each of them, if any
        best = plan_or_suggest(problem, mesh, allowed)
    seconds = time.perf_counter() - began
    others = dict[str, list["Alternative"]]()
    if options.alternatives:
        with text.waiting(options.as_json):
            others = alternatives(best, allowed)
    if options.as_json:
        record = _plan_json(best, options.balancer, seconds)
        record["alternatives"] = {
            kind: [_alternative(x, best) for x in found] for kind, found in others.items()
        }
        if shapes:
            record["shapes"] = [_alternative(shape, best) for shape in shapes]
        print_json(record)
        return
    text.print_plan(best, options.balancer, seconds)
    text.print_alternatives(best, others)
    for name in options.exports:
        text.print_export(name, best)
    text.print_shapes(best, shapes)


def _figures(plan: Plan) -> dict[str, Any]:
    """Returns the keys that the plan and each of its alternatives have."""
    times = ("span", "makespan", "bubble_ratio", "idle_ratio")
    return {
        "partition": plan.partition.counts,
        **{key: getattr(plan.timeline, key) for key in times},
        "imbalance": plan.imbalance,
        "memory": plan.memory,
        "recompute": sorted(plan.recomputed),
    }


def _plan_json(plan: Plan, balancer: str, seconds: float) -> dict[str, Any]:
    """Returns a plan as JSON, in seconds and bytes. A move is [layer, from rank, to rank]."""
    mesh, problem = plan.mesh, plan.problem
    more = ("stage_cost", "lower_bound", "moves", "moved_bytes")
    return {
        "schedule": mesh.schedule,
        "balancer": balancer,
        "ranks": mesh.pipeline,
        "microbatches": mesh.microbatches,
        "objective": str(problem.work.objective),
        **_figures(plan),
        "placement": plan.stage_ranks,
        **{key: getattr(plan, key) for key in more},
        "memory_limit": problem.memory_limit,
        "speeds": problem.speeds,
        "seconds": seconds,
        "words": {name: text.exported(name, plan) for name in FORMATS},
    }


def _alternative(other: Alternative, plan: Plan) -> dict[str, Any]:
    """Returns a choice as JSON. `gain` is the share of the plan's step time that it would save."""
    if other.plan is None:
        return {"choice": other.choice, "problem": other.problem}
    return {"choice": other.choice, "gain": text.gain(other.plan, plan)} | _figures(other.plan)


# -- a mesh ----------------------------------------------------------------------------------------


def _search_mesh(options: PlanOptions, profile: Profile) -> None:
    from dynmo.plan.best import search

    problem, allowed = _asked(options, profile)
    began = time.perf_counter()
    with text.waiting(options.as_json, "meshes ..."):
        found = search(problem, allowed)
    seconds, best = time.perf_counter() - began, found.plans[0]
    if not options.as_json:
        text.print_meshes(allowed, found)
        for name in options.exports:
            text.print_export(name, best)
        print(f"searched in {show_time(seconds)}")
        return
    candidates = [_mesh_json(plan, options.balancer) for plan in found.plans]
    bandwidth = problem.bandwidth
    more = {
        "alternatives": {},
        "gpus": allowed.gpus,
        "global_batch": allowed.batch,
        "zero": options.zero,
        "bandwidth": bandwidth if math.isfinite(bandwidth) else None,
        "mesh": candidates[0],
        "candidates": candidates,
        "refused": [vars(x.mesh) | {"reason": x.reason, "need": x.need} for x in found.refused],
        "slower": found.slower,
    }
    print_json(_plan_json(best, options.balancer, seconds) | more)


def _mesh_json(plan: Plan, balancer: str) -> dict[str, Any]:
    """Returns a mesh as JSON. `step_seconds` includes the `exposed` seconds of reductions."""
    rate = plan.samples_per_second
    return {
        **vars(plan.mesh),
        "balancer": balancer,
        "step_seconds": plan.seconds,
        "exposed": plan.exposed,
        "samples_per_second": rate if math.isfinite(rate) else None,
        **_figures(plan),
    }


# -- every number of ranks -------------------------------------------------------------------------


def _compare_ranks(options: PlanOptions, profile: Profile, share: float) -> None:
    from dynmo.plan.alternatives import rank_table

    # Sizes of microbatches are compared, so the measured one must have a number.
    profile = replace(profile, microbatch=profile.microbatch or 1)
    problem, allowed = _asked(options, profile)
    if options.gpus is None:
        problem, allowed = _like_run(problem, allowed, options)
    began = time.perf_counter()
    with text.waiting(options.as_json, "ranks ..."):
        table = rank_table(problem, allowed, share, retune=len(allowed.sizes) == 1)
    seconds = time.perf_counter() - began
    if options.as_json:
        record = {
            "fewest_ranks": table.fewest,
            "limit_seconds": table.limit_seconds,
            "full_seconds": table.full_seconds,
            "global_batch": allowed.batch,
            "memory_limit": problem.memory_limit,
            "ranks": [_row_json(row, table) for row in table.rows],
            "seconds": seconds,
        }
        print_json(record)
    else:
        text.print_ranks(problem, allowed, table, seconds)


def _like_run(problem: Problem, allowed: Allowed, options: PlanOptions) -> tuple[Problem, Allowed]:
    """Returns the same with the ranks, replicas and batch of a run's folder.

    Other costs are those of one pipeline.
    """
    from dynmo.config import load
    from dynmo.plan.partition import accumulation_problem

    assert options.costs is not None
    path = options.costs / "config.toml"
    if not path.is_file() or options.microbatches is not None:
        return problem, replace(allowed, replicas=(1,))
    config = load(path)
    groups, batch = config.options.accumulation_groups, config.all_microbatches
    fits = [n for n in range(1, batch + 1) if not accumulation_problem(groups, n, batch)]
    replicas = (config.parallel.replicas,) if config.parallel.expert > 1 else tuple(fits)
    work = replace(problem.work, accumulation_groups=groups, zero=config.parallel.zero)
    return replace(problem, work=work), replace(
        allowed,
        gpus=options.ranks or config.parallel.pipeline * config.parallel.replicas,
        batch=config.train.global_batch,
        replicas=replicas,
    )


def _row_json(row: RankRow, table: RankTable) -> dict[str, Any]:
    out: dict[str, Any] = {"ranks": row.ranks}
    if row.plan is None:
        out["problem"] = row.problem
    else:
        plan, rate = row.plan, row.plan.samples_per_second / row.ranks
        out |= vars(plan.mesh) | _figures(plan)
        out |= {
            "step_seconds": plan.seconds,
            "speed": text.speed(plan, table),
            "samples_per_second_per_rank": rate if math.isfinite(rate) else None,
        }
    if row.retuned is not None:
        size = row.retuned.mesh.micro_batch
        out["best_micro_batch"] = {"micro_batch": size, "step_seconds": row.retuned.seconds}
    return out


def _needed_by_workload(path: Path, share: float, as_json: bool) -> None:
    """Prints how many ranks a workload with changing costs needs, and when."""
    from dynmo.plan.replay import ranks_needed
    from dynmo.plan.workload import read

    workload = read(path)
    began = time.perf_counter()
    with text.waiting(as_json, "ranks ..."):
        needed = ranks_needed(workload, share)
    seconds = time.perf_counter() - began
    if as_json:
        print_json(text.needed_json(needed) | {"seconds": seconds})
    else:
        text.print_needed(needed, workload.ranks)
