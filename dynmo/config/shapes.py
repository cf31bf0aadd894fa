"""The meshes that the ranks of a run can form, and their accumulation groups."""

from __future__ import annotations

import math
from collections.abc import Collection

from dynmo.config.sections import Config
from dynmo.errors import ScheduleError
from dynmo.schedule.catalogue import check_microbatches


def accumulation_problem(groups: int, replicas: int, microbatches: int) -> str | None:
    """Why a number of accumulation groups does not fit a mesh.

    Args:
        groups: The number of accumulation groups of all replicas.
        replicas: The number of replicas.
        microbatches: Microbatches of a step, over all replicas.

    Returns:
        The end of a sentence that begins with the number of groups, or None if it fits.
    """
    if microbatches % groups:
        return f"does not divide the {microbatches} microbatches of a step"
    each, rest = divmod(groups, replicas)
    if rest or (replicas > 1 and each & (each - 1)):
        return f"is not {replicas} (replicas) times a power of two"
    return None


def suggest_groups(config: Config, replicas: Collection[int]) -> str:
    """Lists numbers of accumulation groups that fit, for an error message.

    Args:
        config: The run.
        replicas: The numbers fit each of these numbers of replicas.

    Returns:
        At most four numbers. If none fits, advice to use another batch.
    """
    microbatches = config.all_microbatches
    fitting = [
        str(n)
        for n in divisors(microbatches)
        if not any(accumulation_problem(n, r, microbatches) for r in replicas)
    ]
    return " or ".join(fitting[:4]) if fitting else "another train.global_batch"


def mesh_shapes(config: Config, ranks: int | None = None) -> tuple[tuple[int, int], ...]:
    """Lists the meshes that ranks can form.

    They fit the run's batch, accumulation groups and schedule.

    Args:
        config: The run.
        ranks: How many ranks. The default is as many as the run starts with.

    Returns:
        (ranks of a pipeline, replicas) of each mesh, fewest replicas first.
    """
    ranks = ranks or config.parallel.pipeline * config.parallel.data
    microbatches, layers = config.all_microbatches, config.layer_count
    shapes: list[tuple[int, int]] = []
    for data in divisors(math.gcd(ranks, microbatches)):
        pipeline = ranks // data
        try:
            check_microbatches(config.pipeline.schedule, pipeline, microbatches // data)
        except ScheduleError:
            continue
        fits = accumulation_problem(config.accumulation_groups, data, microbatches) is None
        if fits and (layers is None or pipeline * config.chunks <= layers):
            shapes.append((pipeline, data))
    return tuple(shapes)


def divisors(total: int) -> list[int]:
    """Returns the divisors in ascending order."""
    return sorted(
        {d for i in range(1, math.isqrt(total) + 1) if total % i == 0 for d in (i, total // i)}
    )
