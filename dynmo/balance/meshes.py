"""The meshes that ranks can form, and their accumulation groups."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from dynmo.errors import ScheduleError
from dynmo.schedule.catalogue import check_microbatches, chunks_of


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


@dataclass(frozen=True)
class MeshRule:
    """What every mesh of a run must fit.

    Attributes:
        schedule: Name of the schedule.
        chunks: Stages per rank. None means the schedule's own number.
        microbatches: Microbatches of a step, over all replicas.
        groups: Accumulation groups of all replicas.
        layers: Number of layers of the model. None means unknown.
    """

    schedule: str
    chunks: int | None
    microbatches: int
    groups: int
    layers: int | None

    def shapes(self, ranks: int) -> tuple[tuple[int, int], ...]:
        """Lists the meshes that so many ranks can form.

        Returns:
            (ranks of a pipeline, replicas) of each mesh, fewest replicas first.
        """
        chunks, shapes = chunks_of(self.schedule, self.chunks), list[tuple[int, int]]()
        for replicas in divisors(math.gcd(ranks, self.microbatches)):
            pipeline = ranks // replicas
            try:
                check_microbatches(self.schedule, pipeline, self.microbatches // replicas)
            except ScheduleError:
                continue
            fits = accumulation_problem(self.groups, replicas, self.microbatches) is None
            if fits and (self.layers is None or pipeline * chunks <= self.layers):
                shapes.append((pipeline, replicas))
        return tuple(shapes)

    def suggest_groups(self, replicas: Collection[int]) -> str:
        """Lists numbers of accumulation groups that fit, for an error message.

        Args:
            replicas: The numbers fit each of these numbers of replicas.

        Returns:
            At most four numbers. If none fits, advice to use another batch.
        """
        fitting = [
            str(n)
            for n in divisors(self.microbatches)
            if not any(accumulation_problem(n, r, self.microbatches) for r in replicas)
        ]
        return " or ".join(fitting[:4]) if fitting else "another train.global_batch"


def divisors(total: int) -> list[int]:
    """Returns the divisors in ascending order."""
    return sorted(
        {d for i in range(1, math.isqrt(total) + 1) if total % i == 0 for d in (i, total // i)}
    )


def nearest_divisors(value: int, total: int) -> str:
    """Returns the divisors of `total` next to `value`, for an error message."""
    all_divisors = divisors(total)
    below, above = [d for d in all_divisors if d < value], [d for d in all_divisors if d > value]
    return ", ".join(
        str(d) for d in ([max(below)] if below else []) + ([min(above)] if above else [])
    )
