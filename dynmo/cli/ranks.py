"""`dynmo plan --fewest-ranks SHARE` finds the fewest ranks that are fast enough.

It also shows the step time of every number of ranks.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from dynmo.cli import mesh
from dynmo.cli.console import print_table
from dynmo.cli.plan_output import limit_text, show_size, show_time, waiting
from dynmo.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    from rich.table import Table

    from dynmo.cli.plan_options import PlanOptions
    from dynmo.cost.profile_file import Profile
    from dynmo.plan.problem import Allowed, Problem
    from dynmo.plan.ranks import RankRow, RankTable
    from dynmo.plan.workload import RanksNeeded


# -- a workload with changing costs ----------------------------------------------------------------


def run_workload(path: Path, tolerance: float, as_json: bool) -> None:
    """Prints how many ranks a workload needs, and when."""
    from dynmo.plan.workload import ranks_needed, read

    workload = read(path)
    began = time.perf_counter()
    with waiting(as_json, "ranks ..."):
        needed = ranks_needed(workload, tolerance)
    seconds = time.perf_counter() - began
    if as_json:
        print(json.dumps(needed_json(needed) | {"seconds": seconds}, allow_nan=False))
    else:
        print_needed(needed, workload.ranks)


def needed_json(needed: tuple[RanksNeeded, ...]) -> dict[str, Any]:
    """Returns the key `ranks_needed`, if it was asked for."""
    from dynmo.plan.workload import mean_ranks

    if not needed:
        return {}
    moments = [asdict(row) for row in needed]
    return {"ranks_needed": {"moments": moments, "mean": mean_ranks(needed)}}


def print_needed(needed: tuple[RanksNeeded, ...], ranks: int) -> None:
    """Prints one row for each moment, and the mean."""
    from dynmo.plan.workload import mean_ranks

    print()
    print_table(
        [
            {
                "steps": f"{row.first}-{row.last}",
                "ranks": str(row.ranks),
                "s/step": f"{row.seconds:.4g}",
                "layers": "+".join(map(str, row.layers)),
            }
            for row in needed
        ]
    )
    print(f"needs {mean_ranks(needed):.1f} of {ranks} ranks on average")


# -- recorded costs --------------------------------------------------------------------------------


def check_tolerance(tolerance: float) -> None:
    """Raises InputError unless the tolerance is a share."""
    if not math.isfinite(tolerance):
        raise InputError(f"--fewest-ranks {tolerance}: a share is expected, such as 0.05")


def asked(options: PlanOptions, profile: Profile) -> tuple[Problem, Allowed]:
    """Returns what is known, and the meshes of up to the given number of ranks.

    Without `--gpus` it is one for pipelines with the recorded number of microbatches. If the costs
    are those of a run's folder, its config adds the replicas and the global batch.
    """
    size = profile.microbatch or 1
    profile = replace(profile, microbatch=size)
    if options.gpus is not None:
        return mesh.asked(options, profile)
    ranks, microbatches = options.pipeline(profile)
    pipelines = replace(
        options,
        gpus=ranks,
        global_batch=size * microbatches,
        micro_batch=str(size),
        schedule=options.schedule_of(profile),
    )
    return _like_run(*mesh.asked(pipelines, profile), options)


def _like_run(problem: Problem, allowed: Allowed, options: PlanOptions) -> tuple[Problem, Allowed]:
    """Returns the same with the ranks, replicas and batch of a run's folder."""
    from dynmo.config import load
    from dynmo.plan.meshes import accumulation_problem

    path = options.costs_path() / "config.toml"
    if not path.is_file() or options.microbatches is not None:
        return problem, replace(allowed, replicas=(1,))
    config = load(path)
    groups, counts = config.options.accumulation_groups, range(1, config.all_microbatches + 1)
    fits = [n for n in counts if not accumulation_problem(groups, n, config.all_microbatches)]
    replicas = (config.parallel.replicas,) if config.parallel.expert > 1 else tuple(fits)
    work = replace(problem.work, accumulation_groups=groups, zero=config.parallel.zero)
    return replace(problem, work=work), replace(
        allowed,
        gpus=options.ranks or config.parallel.pipeline * config.parallel.replicas,
        batch=config.train.global_batch,
        replicas=replicas,
    )


def run(problem: Problem, allowed: Allowed, tolerance: float, as_json: bool) -> None:
    """Plans every number of ranks up to the request's, and prints the result."""
    from dynmo.plan.ranks import rank_table

    began = time.perf_counter()
    with waiting(as_json, "ranks ..."):
        table = rank_table(problem, allowed, tolerance, retune=len(allowed.sizes) == 1)
    seconds = time.perf_counter() - began
    if as_json:
        print(json.dumps(to_json(problem, allowed, table, seconds), allow_nan=False))
    else:
        _print_text(problem, allowed, table, seconds)


def to_json(problem: Problem, allowed: Allowed, table: RankTable, seconds: float) -> dict[str, Any]:
    """Returns the result as JSON, in seconds and bytes.

    `fewest_ranks` are the fewest ranks whose step takes `limit_seconds` at most.
    """
    return {
        "fewest_ranks": table.fewest,
        "limit_seconds": table.limit_seconds,
        "full_seconds": table.full_seconds,
        "global_batch": allowed.batch,
        "memory_limit": problem.memory_limit,
        "ranks": [_row_json(row, table) for row in table.rows],
        "seconds": seconds,
    }


def _row_json(row: RankRow, table: RankTable) -> dict[str, Any]:
    plan = row.plan
    out: dict[str, Any] = {"ranks": row.ranks}
    if plan is None:
        out["problem"] = row.problem
    else:
        out |= vars(plan.mesh) | {
            "step_seconds": plan.seconds,
            "memory": plan.memory,
            "speed": _speed(plan.seconds, table),
            "samples_per_second_per_rank": _per_rank(row),
            "partition": plan.partition.counts,
        }
    if row.retuned is not None:
        size, seconds = row.retuned.mesh.micro_batch, row.retuned.seconds
        out["best_micro_batch"] = {"micro_batch": size, "step_seconds": seconds}
    return out


def _speed(seconds: float, table: RankTable) -> float:
    """Returns the share of the speed on all ranks."""
    return table.full_seconds / seconds if seconds else 1.0


def _per_rank(row: RankRow) -> float | None:
    """Returns sequences per second of each rank. None if a step takes no time."""
    plan = row.plan
    if plan is None or not plan.seconds:
        return None
    return plan.samples_per_second / row.ranks


def _print_text(problem: Problem, allowed: Allowed, table: RankTable, seconds: float) -> None:
    from dynmo.cli.console import console_for_tables

    batch = f"a global batch of {allowed.batch}{limit_text(problem.memory_limit)}"
    print(f"1 to {allowed.gpus} ranks, {batch}\n")
    console_for_tables().print(_table(table))
    for row in table.rows:
        if row.plan is None:
            print(f"  {row.ranks}: {row.problem}")
    chosen = table.rows[table.fewest - 1].plan
    assert chosen is not None
    takes = f"a step of {show_time(chosen.seconds)}, {show_time(table.limit_seconds)} are allowed"
    print(f"{table.fewest} of {allowed.gpus} ranks are enough: {takes}")
    print(f"searched in {show_time(seconds)}")


def _table(table: RankTable) -> Table:
    from rich.table import Table

    sizes = any(row.plan is not None and any(row.plan.memory) for row in table.rows)
    retuned = any(row.retuned is not None for row in table.rows)
    schedules = len({row.plan.mesh.schedule for row in table.rows if row.plan is not None}) > 1
    out = Table()
    headings = ["", "ranks", "mesh", "microbatches", *["schedule"] * schedules, "step", "speed"]
    headings += ["sequences/s per rank", *["memory"] * sizes, *["best micro_batch"] * retuned]
    for heading in headings:
        out.add_column(heading, justify="right")
    out.add_column("layers", overflow="fold")
    for row in table.rows:
        plan = row.plan
        if plan is None:
            blank = ["-"] * (len(headings) - 2 - retuned)
            out.add_row("", str(row.ranks), *blank, *[_retuned(row)] * retuned, "not possible")
            continue
        shape, per_rank, chosen = plan.mesh, _per_rank(row), row.ranks == table.fewest
        cells = [
            "fewest" if chosen else "",
            str(row.ranks),
            f"{shape.pipeline} x {shape.replicas}",
            f"{shape.microbatches} of {shape.micro_batch}",
            *[shape.schedule] * schedules,
            show_time(plan.seconds),
            f"{_speed(plan.seconds, table):.1%}",
            "-" if per_rank is None else f"{per_rank:,.4g}",
            *[show_size(max(plan.memory))] * sizes,
            *[_retuned(row)] * retuned,
            "+".join(map(str, plan.partition.counts)),
        ]
        out.add_row(*cells, style="bold" if chosen else None)
    return out


def _retuned(row: RankRow) -> str:
    """Returns the best size of a microbatch, and its effect on the step."""
    best, plan = row.retuned, row.plan
    if best is None:
        return "-"
    size = str(best.mesh.micro_batch)
    if plan is None or not plan.seconds:
        return size
    change = best.seconds / plan.seconds - 1
    return f"{size} ({change:+.1%})" if best.mesh.micro_batch != plan.mesh.micro_batch else size
