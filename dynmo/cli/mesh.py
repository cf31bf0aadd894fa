"""`dynmo plan --gpus N --global-batch B` searches a mesh.

A mesh is a number of replicas and the ranks of a pipeline. The search also finds the microbatches
and the schedule.
"""

from __future__ import annotations

import json
import math
import time
from typing import TYPE_CHECKING, Any

from dynmo.cli.plan_output import (
    limit_text,
    picture,
    plan_json,
    print_export,
    show_size,
    show_time,
    waiting,
)
from dynmo.errors import InputError
from dynmo.schedule.catalogue import AUTO, SHAPES

if TYPE_CHECKING:
    from rich.table import Table

    from dynmo.cli.plan_options import PlanOptions
    from dynmo.cost.profile_file import Profile
    from dynmo.plan.mesh_plan import MeshPlan
    from dynmo.plan.mesh_search import MeshRequest, MeshSearchResult


def request_of(options: PlanOptions, profile: Profile) -> MeshRequest:
    """Returns the request of a mesh search."""
    from dynmo.plan.mesh_search import MeshRequest

    assert options.gpus is not None
    assert options.global_batch is not None
    memory_limit = options.memory_limit_bytes()
    if memory_limit is not None and not any(
        x.static_bytes or x.activation_bytes for x in profile.layers
    ):
        raise InputError(
            "a memory limit, but the costs have no sizes; give weight_bytes, activation_bytes, "
            "... (one per layer)"
        )
    return MeshRequest(
        profile,
        options.gpus,
        options.global_batch,
        _sizes(options.micro_batch),
        _schedules(options.schedule),
        options.balancer or "exact",
        options.chunks,
        memory_limit,
        options.zero or 0,
        _bandwidth(options.bandwidth, profile),
        options.recompute_mode(),
        options.objective,
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

    try:
        return float(text)
    except ValueError:
        pass
    try:
        return float(parse_bytes(text))
    except ValueError:
        raise InputError(
            f"--bandwidth {text}: bytes per second are expected, such as 25e9 or 40GiB"
        ) from None


def run(request: MeshRequest, as_json: bool, exports: list[str]) -> None:
    """Searches a mesh and prints the result."""
    from dynmo.plan.mesh_search import search

    began = time.perf_counter()
    with waiting(as_json, "meshes ..."):
        result = search(request)
    seconds = time.perf_counter() - began
    if as_json:
        print(json.dumps(to_json(request, result, seconds), allow_nan=False))
        return
    from dynmo.cli.console import console_for_tables

    console, best = console_for_tables(), result.candidates[0]
    _print_best(request, best)
    print()
    for line in picture(best.plan):
        console.print(line, soft_wrap=True)
    print()
    console.print(_candidates(result))
    _print_others(result)
    for name in exports:
        print_export(name, best.plan)
    print(f"searched in {show_time(seconds)}")


# -- JSON ------------------------------------------------------------------------------------------


def to_json(request: MeshRequest, result: MeshSearchResult, seconds: float) -> dict[str, Any]:
    """Returns the result as JSON.

    It has the keys of `dynmo plan` for one replica of the best mesh. Further keys are `mesh`,
    `candidates` (the best first) and `refused`.
    """
    best = result.candidates[0]
    return plan_json(best.plan, seconds) | {
        "alternatives": {},
        "gpus": request.gpus,
        "global_batch": request.global_batch,
        "zero": request.zero,
        "bandwidth": request.bandwidth if math.isfinite(request.bandwidth) else None,
        "mesh": _mesh(best),
        "candidates": [_mesh(candidate) for candidate in result.candidates],
        "refused": [vars(x.mesh) | {"reason": x.reason, "need": x.need} for x in result.refused],
        "slower": result.slower,
    }


def _mesh(candidate: MeshPlan) -> dict[str, Any]:
    """Returns a mesh as JSON.

    `step_seconds` includes the `exposed` seconds of reductions.
    """
    timeline = candidate.plan.timeline
    return vars(candidate.mesh) | {
        "balancer": candidate.plan.request.balancer,
        "step_seconds": candidate.seconds,
        "exposed": candidate.exposed,
        "samples_per_second": candidate.samples_per_second
        if math.isfinite(candidate.samples_per_second)
        else None,
        "bubble_ratio": timeline.bubble_ratio,
        "idle_ratio": timeline.idle_ratio,
        "memory": candidate.memory,
        "partition": candidate.plan.partition.counts,
        "recompute": sorted(candidate.plan.request.recomputed),
    }


# -- text ------------------------------------------------------------------------------------------


def _print_best(request: MeshRequest, best: MeshPlan) -> None:
    zero = ", optimizer state divided over the replicas (ZeRO-1)" if request.zero else ""
    print(
        f"{request.gpus} GPUs, a global batch of {request.global_batch}"
        f"{limit_text(request.memory_limit)}{zero}"
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
        f"best: {best.mesh}, placed by {best.plan.request.balancer}: a step of "
        f"{show_time(best.seconds)}{exposed}; {rate}"
    )
    if math.isinf(request.bandwidth):
        print(
            "no bandwidth was measured: what replicas sum takes no time here; --bandwidth says "
            "how fast it is"
        )
    if best.plan.request.recomputed:
        names = [best.plan.request.profile.names[i] for i in sorted(best.plan.request.recomputed)]
        print(f"recomputed in the backward: {len(names)} layers: {', '.join(names)}")


def _candidates(result: MeshSearchResult) -> Table:
    from rich.table import Table

    best = result.candidates[0]
    sizes = any(any(x.memory) for x in result.candidates)
    recomputes = any(x.plan.request.recomputed for x in result.candidates)
    table = Table(title="candidates", title_justify="left")
    headings = ["ranks", "replicas", "microbatches", "of", "schedule", "step", "against best"]
    headings += ["exposed", "bubble", *["memory"] * sizes, *["recomputed"] * recomputes]
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "schedule" else "right")
    table.add_column("layers", overflow="fold")
    for x in result.candidates:
        mesh = x.mesh
        table.add_row(
            str(mesh.pipeline),
            str(mesh.replicas),
            str(mesh.microbatches),
            str(mesh.micro_batch),
            mesh.schedule,
            show_time(x.seconds),
            f"{x.seconds / best.seconds - 1:+.1%}" if best.seconds else "-",
            show_time(x.exposed),
            f"{x.bubble:.1%}",
            *[show_size(max(x.memory))] * sizes,
            *[str(len(x.plan.request.recomputed))] * recomputes,
            "+".join(map(str, x.plan.partition.counts)),
        )
    return table


_WHY = ("memory", "does not divide", "need at least")


def _print_others(result: MeshSearchResult) -> None:
    """Prints why other meshes are refused, with number and nearest mesh per reason."""
    if result.slower:
        print(f"{result.slower} more are slower")
    kinds: dict[str, list[Any]] = {}
    for x in result.refused:
        kinds.setdefault(next((word for word in _WHY if word in x.reason), "other"), []).append(x)
    for refused in kinds.values():
        closest = min(refused, key=lambda x: (x.need or 0, x.mesh.pipeline))
        print(f"{len(refused)} refused, such as {closest.mesh}: {closest.reason}")
