"""The meshes that ranks can form, their accumulation groups, and the ranks that stay."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dynmo.errors import PartitionError, ScheduleError
from dynmo.schedule.catalogue import check_microbatches, chunks_of

if TYPE_CHECKING:
    from dynmo.plan.problem import Mesh


def accumulation_problem(groups: int, replicas: int, microbatches: int) -> str | None:
    """Why a number of accumulation groups does not fit a mesh, or None if it does.

    The microbatches are those of a step, over all replicas. The answer is the end of a sentence
    that begins with the number of groups.
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

    Microbatches of a step and accumulation groups are those of all replicas. `layers` is None if
    the model is not known.
    """

    schedule: str
    chunks: int | None
    microbatches: int
    groups: int
    layers: int | None

    def shapes(self, ranks: int) -> tuple[tuple[int, int], ...]:
        """(ranks of a pipeline, replicas) of each mesh of so many ranks, fewest replicas first."""
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
        """Numbers of accumulation groups that fit all these numbers of replicas, for a message."""
        fitting = [
            str(n)
            for n in divisors(self.microbatches)
            if not any(accumulation_problem(n, r, self.microbatches) for r in replicas)
        ]
        return " or ".join(fitting[:4]) if fitting else "another train.global_batch"


def fewer_replicas(mesh: Mesh, groups: int) -> tuple[int, ...]:
    """Returns the numbers of replicas that other numbers of ranks may have.

    A model may not allow more replicas than now.
    """
    batch = mesh.replicas * mesh.microbatches
    fewer = (each for each in divisors(batch) if each <= mesh.replicas)
    return tuple(each for each in fewer if not accumulation_problem(groups, each, batch))


def near_sizes(mesh: Mesh, groups: int, replicas: Collection[int]) -> tuple[int, ...]:
    """Returns sizes of a microbatch that the accumulation groups allow.

    Candidates are the present size, its halves and its doubles.
    """
    size, batch = mesh.micro_batch, mesh.global_batch
    near = sorted({size // 4, size // 2, size, 2 * size, 4 * size} - {0})
    return tuple(
        each
        for each in near
        if batch % each == 0
        and not any(accumulation_problem(groups, count, batch // each) for count in replicas)
    )


def divisors(total: int) -> list[int]:
    return sorted(
        {d for i in range(1, math.isqrt(total) + 1) if total % i == 0 for d in (i, total // i)}
    )


def nearest_divisors(value: int, total: int) -> str:
    """The divisors of `total` next to `value`, for an error message."""
    all_divisors = divisors(total)
    below, above = [d for d in all_divisors if d < value], [d for d in all_divisors if d > value]
    return ", ".join(
        str(d) for d in ([max(below)] if below else []) + ([min(above)] if above else [])
    )


def kept_ranks(nodes: Sequence[str], count: int) -> tuple[int, ...]:
    """Chooses the ranks that stay when a run goes on with fewer, ascending.

    As many nodes as possible become empty, because a machine is free only when all of its ranks
    are. The smallest nodes go first, the last of equally small ones before the others. Rank 0
    always stays. A node that loses only some of its ranks loses the highest ones.

    Args:
        nodes: Name of the machine of each rank.
        count: Number of ranks that stay.

    Example:
        >>> kept_ranks(("a", "a", "b", "b", "b", "c", "c"), 5)
        (0, 1, 2, 3, 4)
    """
    if not 1 <= count <= len(nodes):
        raise PartitionError(f"{count} of {len(nodes)} ranks cannot stay; give 1 to {len(nodes)}")
    sizes = Counter(nodes)
    last = {node: rank for rank, node in enumerate(nodes)}
    order = sorted(sizes, key=lambda node: (node == nodes[0], sizes[node], -last[node]))
    place = {node: position for position, node in enumerate(order)}
    leaving = sorted(range(1, len(nodes)), key=lambda rank: (place[nodes[rank]], -rank))
    return tuple(sorted({*range(len(nodes))} - {*leaving[: len(nodes) - count]}))
