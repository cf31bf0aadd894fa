"""`dynmo plan --gpus N --global-batch B` searches a mesh.

A mesh is a number of replicas and the ranks of a pipeline. The search also finds the microbatches
and the schedule.
"""

from __future__ import annotations

import json
import math
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dynmo.cli.console import print_table
from dynmo.cli.plan_output import (
    cells,
    figures,
    limit_text,
    plan_json,
    print_export,
    print_picture,
    show_time,
    waiting,
)
from dynmo.errors import InputError
from dynmo.schedule.catalogue import AUTO, SHAPES

if TYPE_CHECKING:
    from dynmo.cli.plan_options import PlanOptions
    from dynmo.cost.costs_file import Profile
    from dynmo.plan.best import Found
    from dynmo.plan.evaluate import Plan
    from dynmo.plan.problem import Allowed, Problem


def asked(options: PlanOptions, profile: Profile) -> tuple[Problem, Allowed]:
    """Returns what is known, and the meshes that a search may choose."""
    from dynmo.plan.problem import Allowed, Problem, Work

    assert options.gpus is not None
    assert options.global_batch is not None
    work = Work(options.objective, chunks=options.chunks, zero=options.zero or 0)
    limit, bandwidth = options.memory_limits(), _bandwidth(options.bandwidth, profile)
    problem = Problem(profile, work, limit, bandwidth=bandwidth)
    return problem, Allowed(
        options.gpus,
        options.global_batch,
        _sizes(options.micro_batch),
        _schedules(options.schedule),
        balancer=options.balancer or "exact",
        recompute=options.recompute,
    )


def _schedules(name: str | None) -> tuple[str, ...]:
    if name is None:
        return ()
    return SHAPES if name == AUTO else (name,)


def _sizes(text: str | None) -> tuple[int, ...]:
    try:
        return () if text is None else tuple(int(word) for word in text.split(","))
    except ValueError:
        raise InputError(
            f"--micro-batch {text}: numbers of sequences with commas between them are expected, "
            "such as 1,2,4"
        ) from None


def _bandwidth(text: str | None, profile: Profile) -> float:
    """Returns the given bandwidth, or else that of the slowest measured link.

    Without any link, reductions take no time.
    """
    if text is None:
        return min((link.bytes_per_second for _, link in profile.links), default=math.inf)
    from dynmo.options import parse_bytes

    for read in (float, parse_bytes):
        with suppress(ValueError):
            return float(read(text))
    raise InputError(f"--bandwidth {text}: bytes per second are expected, such as 25e9 or 40GiB")


def run(problem: Problem, allowed: Allowed, as_json: bool, exports: list[str]) -> None:
    """Searches a mesh and prints the result."""
    from dynmo.plan.best import search

    began = time.perf_counter()
    with waiting(as_json, "meshes ..."):
        result = search(problem, allowed)
    seconds = time.perf_counter() - began
    if as_json:
        print(json.dumps(to_json(allowed, result, seconds), allow_nan=False))
        return
    best = result.plans[0]
    _print_best(allowed, best)
    print()
    print_picture(best)
    print()
    print_table([_row(plan, best) for plan in result.plans], "candidates")
    _print_others(result)
    for name in exports:
        print_export(name, best)
    print(f"searched in {show_time(seconds)}")


# -- JSON ------------------------------------------------------------------------------------------


def to_json(allowed: Allowed, result: Found, seconds: float) -> dict[str, Any]:
    """Returns the result as JSON.

    It has the keys of `dynmo plan` for one replica of the best mesh. Further keys are `mesh`,
    `candidates` (the best first) and `refused`.
    """
    best = result.plans[0]
    known = best.problem
    return plan_json(best, allowed.balancer, seconds) | {
        "alternatives": {},
        "gpus": allowed.gpus,
        "global_batch": allowed.batch,
        "zero": known.work.zero,
        "bandwidth": known.bandwidth if math.isfinite(known.bandwidth) else None,
        "mesh": _mesh(best, allowed.balancer),
        "candidates": [_mesh(candidate, allowed.balancer) for candidate in result.plans],
        "refused": [vars(x.mesh) | {"reason": x.reason, "need": x.need} for x in result.refused],
        "slower": result.slower,
    }


def _mesh(candidate: Plan, balancer: str) -> dict[str, Any]:
    """Returns a mesh as JSON.

    `step_seconds` includes the `exposed` seconds of reductions.
    """
    rate = candidate.samples_per_second
    return {
        **vars(candidate.mesh),
        "balancer": balancer,
        "step_seconds": candidate.seconds,
        "exposed": candidate.exposed,
        "samples_per_second": rate if math.isfinite(rate) else None,
        **figures(candidate),
    }


# -- text ------------------------------------------------------------------------------------------


def _print_best(allowed: Allowed, best: Plan) -> None:
    zero = ", optimizer state divided over the replicas (ZeRO-1)" if best.problem.work.zero else ""
    print(
        f"{allowed.gpus} GPUs, a global batch of {allowed.batch}"
        f"{limit_text(best.problem.memory_limit)}{zero}"
    )
    rate = (
        f"{best.samples_per_second:,.4g} sequences a second"
        if math.isfinite(best.samples_per_second)
        else ""
    )
    exposed = (
        f", {show_time(best.exposed)} of it reductions after the last op" if best.exposed else ""
    )
    print(
        f"best: {best.mesh}, placed by {allowed.balancer}: a step of "
        f"{show_time(best.seconds)}{exposed}; {rate}"
    )
    if math.isinf(best.problem.bandwidth):
        print(
            "no bandwidth was measured: what replicas sum takes no time here; --bandwidth says "
            "how fast it is"
        )
    if best.recomputed:
        names = [best.problem.profile.names[i] for i in sorted(best.recomputed)]
        print(f"recomputed in the backward: {len(names)} layers: {', '.join(names)}")


def _row(plan: Plan, best: Plan) -> dict[str, str]:
    headings = ("ranks", "replicas", "microbatches", "of", "schedule")
    mesh = dict(zip(headings, map(str, vars(plan.mesh).values()), strict=True))
    exposed = {"exposed": show_time(plan.exposed)}
    return mesh | cells(plan, "against best", best) | exposed


_WHY = ("memory", "does not divide", "need at least")


def _print_others(result: Found) -> None:
    """Prints why other meshes are refused, with number and nearest mesh per reason."""
    if result.slower:
        print(f"{result.slower} more are slower")
    kinds: dict[str, list[Any]] = {}
    for x in result.refused:
        kinds.setdefault(next((word for word in _WHY if word in x.reason), "other"), []).append(x)
    for refused in kinds.values():
        closest = min(refused, key=lambda x: (x.need or 0, x.mesh.pipeline))
        print(f"{len(refused)} refused, such as {closest.mesh}: {closest.reason}")
