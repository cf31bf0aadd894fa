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
from dynmo.cli.plan_output import (
    change,
    figures,
    limit_text,
    plus,
    show_size,
    show_time,
    waiting,
)
from dynmo.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    from dynmo.cli.plan_options import PlanOptions
    from dynmo.cost.costs_file import Profile
    from dynmo.plan.alternatives import RankRow, RankTable
    from dynmo.plan.problem import Allowed, Problem
    from dynmo.plan.replay import RanksNeeded


# -- a workload with changing costs ----------------------------------------------------------------


def run_workload(path: Path, tolerance: float, as_json: bool) -> None:
    """Prints how many ranks a workload needs, and when."""
    from dynmo.plan.replay import ranks_needed
    from dynmo.plan.workload import read

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
    from dynmo.plan.replay import mean_ranks

    if not needed:
        return {}
    moments = [asdict(row) for row in needed]
    return {"ranks_needed": {"moments": moments, "mean": mean_ranks(needed)}}


def print_needed(needed: tuple[RanksNeeded, ...], ranks: int) -> None:
    """Prints one row for each moment, and the mean."""
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
    from dynmo.plan.partition import accumulation_problem

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
    from dynmo.plan.alternatives import rank_table

    began = time.perf_counter()
    with waiting(as_json, "ranks ..."):
        table = rank_table(problem, allowed, tolerance, retune=len(allowed.sizes) == 1)
    seconds = time.perf_counter() - began
    record = to_json(problem, allowed, table, seconds)
    if as_json:
        print(json.dumps(record, allow_nan=False))
    else:
        _print_text(record, allowed.gpus)


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
    plan, best = row.plan, row.retuned
    out: dict[str, Any] = {"ranks": row.ranks}
    if plan is None:
        out["problem"] = row.problem
    else:
        rate = plan.samples_per_second / row.ranks
        out |= vars(plan.mesh) | figures(plan)
        out |= {
            "step_seconds": plan.seconds,
            "speed": table.full_seconds / plan.seconds if plan.seconds else 1.0,
            "samples_per_second_per_rank": rate if math.isfinite(rate) else None,
        }
    if best is not None:
        size = best.mesh.micro_batch
        out["best_micro_batch"] = {"micro_batch": size, "step_seconds": best.seconds}
    return out


def _print_text(record: dict[str, Any], most: int) -> None:
    rows, fewest = record["ranks"], record["fewest_ranks"]
    batch = f"a global batch of {record['global_batch']}{limit_text(record['memory_limit'])}"
    print(f"1 to {most} ranks, {batch}\n")
    several = len({row["schedule"] for row in rows if "schedule" in row}) > 1
    print_table([_row(row, several, row["ranks"] == fewest) for row in rows])
    for row in rows:
        if "problem" in row:
            print(f"  {row['ranks']}: {row['problem']}")
    chosen, limit = rows[fewest - 1]["step_seconds"], record["limit_seconds"]
    print(
        f"{fewest} of {most} ranks are enough: a step of {show_time(chosen)}, {show_time(limit)} "
        f"are allowed\nsearched in {show_time(record['seconds'])}"
    )


def _row(row: dict[str, Any], several_schedules: bool, is_fewest: bool) -> dict[str, str]:
    out = {"": "fewest" if is_fewest else "", "ranks": str(row["ranks"])}
    if "problem" in row:
        out["layers"] = "not possible"
    else:
        rate = row["samples_per_second_per_rank"]
        out |= {
            "mesh": f"{row['pipeline']} x {row['replicas']}",
            "microbatches": f"{row['microbatches']} of {row['micro_batch']}",
            **({"schedule": row["schedule"]} if several_schedules else {}),
            "step": show_time(row["step_seconds"]),
            "speed": f"{row['speed']:.1%}",
            "sequences/s per rank": "-" if rate is None else f"{rate:,.4g}",
            **({"memory": show_size(max(row["memory"]))} if any(row["memory"]) else {}),
            "layers": plus(row["partition"]),
        }
    if best := row.get("best_micro_batch"):
        out["best micro_batch"] = str(best["micro_batch"])
        if best["micro_batch"] != row.get("micro_batch", best["micro_batch"]):
            effect = change(best["step_seconds"], row["step_seconds"])
            out["best micro_batch"] += f" ({effect})"
    return out
