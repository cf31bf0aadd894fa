"""Every schedule by name: stages per rank, and the rank of each stage.

name               stages per rank   made from           memory of a rank, in activations
                                                         of all its stages
gpipe              1                 p, m                m
1f1b, zb-h1        1                 p, m                p
zb-h2              1                 p, m                2p - 1
interleaved-1f1b   v (2)             p, m                more than p
zb-auto            1                 the stages' costs   as much as the limit allows
zb-v               2                 the stages' costs   p
v-auto             2                 the stages' costs   as much as the limit allows
v-half             2                 the stages' costs   about p / 2
v-min              2                 the stages' costs   about p / 3

`make` makes any of them. "auto" stands for the fastest of `SHAPES`, each with the
placement that is best for it. It is no schedule itself: `plan.alternatives` chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

from dynmo.cost.layer_cost import Costs, uniform_costs
from dynmo.errors import ScheduleError
from dynmo.schedule.bounds import Objective
from dynmo.schedule.generators import by_hand, v_stage_ranks
from dynmo.schedule.op import Schedule


class _Entry(NamedTuple):
    """How a schedule is made.

    Attributes:
        warmup: That of `by_hand`. None: costs shape the schedule.
        splits: Whether W is apart from B.
        chunks: Stages per rank.
        free: Whether another number of stages per rank may be chosen.
    """

    warmup: Callable[[int, int, int, int], int] | None = None
    splits: bool = False
    chunks: int = 1
    free: bool = False

    @property
    def from_costs(self) -> bool:
        return self.warmup is None


def _all(ranks: int, microbatches: int, chunks: int, rank: int) -> int:
    return microbatches


def _way(ranks: int, microbatches: int, chunks: int, rank: int) -> int:
    return ranks - 1 - rank


def _two_ways(ranks: int, microbatches: int, chunks: int, rank: int) -> int:
    return 2 * (ranks - 1 - rank)


def _interleaved(ranks: int, microbatches: int, chunks: int, rank: int) -> int:
    # The way to the last rank and back, and all chunks but the last filled. One chunk needs no more
    # than 1F1B's warm-up.
    way = ranks - 1 - rank
    return way if chunks == 1 else 2 * way + (chunks - 1) * ranks


# Microbatches of all ranks together. More would fill the memory before any error comes.
_MOST_CELLS = 1 << 20

SCHEDULES: dict[str, _Entry] = {
    "gpipe": _Entry(_all),
    "1f1b": _Entry(_way),
    "zb-h1": _Entry(_way, splits=True),
    "zb-h2": _Entry(_two_ways, splits=True),
    "interleaved-1f1b": _Entry(_interleaved, chunks=2, free=True),
    "zb-auto": _Entry(),
    "zb-v": _Entry(chunks=2),
    "v-auto": _Entry(chunks=2),
    "v-half": _Entry(chunks=2),
    "v-min": _Entry(chunks=2),
}

AUTO = "auto"
ScheduleName: TypeAlias = Literal[
    "gpipe",
    "1f1b",
    "zb-h1",
    "zb-h2",
    "interleaved-1f1b",
    "zb-auto",
    "zb-v",
    "v-auto",
    "v-half",
    "v-min",
    "auto",
]
"""The names in `SCHEDULES`, and "auto"."""
SHAPES = ("zb-auto", "v-auto", "interleaved-1f1b")
"""What "auto" chooses from. Those that send fewer messages come first."""


def entry(name: str) -> _Entry:
    if name == AUTO:
        raise ScheduleError(
            f"{AUTO} chooses a schedule together with the placement of layers, which nothing "
            f"places here; choose one of {', '.join(SCHEDULES)}"
        )
    if name not in SCHEDULES:
        raise ScheduleError(f"unknown schedule {name!r}; choose one of {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


def chunks_of(name: str, asked: int | None = None) -> int:
    """Return the stages per rank: those that the user asked for, or the schedule's own number.

    For "auto" they are the fewest.
    """
    if name == AUTO:
        if asked not in (None, 1):
            raise ScheduleError(f"{AUTO} chooses the stages of a rank itself; leave chunks out")
        return 1
    known = entry(name)
    if asked is None or asked == known.chunks:
        return known.chunks
    if asked < 1:
        raise ScheduleError(f"{name}: {asked} chunks; a rank holds at least 1 stage")
    if not known.free:
        raise ScheduleError(
            f"{name} has {known.chunks} stage{'s' * (known.chunks > 1)} a rank, not {asked}; "
            "leave chunks out"
        )
    return asked


def shapes_of(name: str, ranks: int, microbatches: int, layers: int) -> tuple[str, ...]:
    """Return the schedules that `name` stands for: itself, or what "auto" may choose from.

    A single rank has nothing to overlap, so one stage is best there.
    """
    if name != AUTO:
        return (name,)
    shapes = SHAPES[:1] if ranks == 1 else SHAPES
    return tuple(
        each
        for each in shapes
        if ranks * SCHEDULES[each].chunks <= layers
        and (each != "interleaved-1f1b" or microbatches % ranks == 0)
    )


def stage_ranks_of(name: str, ranks: int, chunks: int | None = None) -> tuple[int, ...]:
    """Return the rank of each stage: round and round (interleaved), or down and up (V shapes)."""
    count = chunks_of(name, chunks)
    if ranks < 1:
        raise ScheduleError(f"{name}: {ranks} ranks; at least 1 is needed")
    if count == 2 and not SCHEDULES[name].free:
        return v_stage_ranks(ranks)
    return tuple(range(ranks)) * count


def check_microbatches(name: str, ranks: int, microbatches: int) -> None:
    """Check that the schedule can have so many. Only interleaving needs a particular number."""
    if microbatches < 1:
        raise ScheduleError(f"{name}: {microbatches} microbatches; at least 1 is needed")
    if ranks * microbatches > _MOST_CELLS:
        raise ScheduleError(
            f"{name}: {microbatches} microbatches on {ranks} ranks are too many; ranks times "
            f"microbatches is at most {_MOST_CELLS}"
        )
    if name == "interleaved-1f1b" and microbatches % ranks:
        near = [m for m in (microbatches // ranks * ranks, -(-microbatches // ranks) * ranks) if m]
        raise ScheduleError(
            f"{name}: {microbatches} microbatches are not a multiple of {ranks} ranks; use "
            f"{' or '.join(map(str, near))}"
        )


def make(
    name: str,
    ranks: int,
    microbatches: int,
    *,
    costs: Costs | None = None,
    chunks: int | None = None,
    caps: Sequence[float] | None = None,
    first_trainable: int = 0,
    objective: Objective = Objective.SPAN,
) -> Schedule:
    """Make the schedule called `name`, one of `SCHEDULES`.

    Args:
        name: Name of the schedule.
        ranks: Number of pipeline ranks.
        microbatches: Microbatches of a step.
        costs: Costs of every stage. None means that all are alike: F = B = W, and no links.
        chunks: Stages per rank. None means the schedule's own number.
        caps: The most live memory of each rank, in the costs' unit. Only schedules that are made
            from costs keep to it. The caller checks the others.
        first_trainable: The stages before this one run F only.
        objective: The time that a schedule made from costs keeps short.

    Raises:
        ScheduleError: The schedule cannot be made so. The message says which values would do.
    """
    stage_ranks = stage_ranks_of(name, ranks, chunks)
    check_microbatches(name, ranks, microbatches)
    stages, made = len(stage_ranks), entry(name)
    if not 0 <= first_trainable < stages:
        raise ScheduleError(
            f"{name}: first trainable stage {first_trainable} of {stages} stages; at least the "
            "last stage must train"
        )
    if made.warmup is not None:
        count = chunks_of(name, chunks)
        return by_hand(name, ranks, microbatches, made.warmup, made.splits, count, first_trainable)
    if costs is None:
        costs = uniform_costs(stages, 1.0, 1.0, 1.0)
    if len(costs.stages) != stages:
        raise ScheduleError(
            f"{name} on {ranks} ranks has {stages} stages, but costs are given for "
            f"{len(costs.stages)}"
        )
    if caps is not None and len(caps) != ranks:
        raise ScheduleError(
            f"{name}: {len(caps)} memory limits for {ranks} ranks; give one limit per rank (inf: "
            "none)"
        )
    # Compiled loops take a while to import.
    from dynmo.schedule.automatic.vshape import v_shape
    from dynmo.schedule.automatic.zero_bubble import automatic

    search: Callable[..., Schedule] = automatic if name == "zb-auto" else partial(v_shape, name)
    return search(
        costs, microbatches, caps=caps, first_trainable=first_trainable, objective=objective
    )


def full_schedule(name: str, ranks: int, microbatches: int, chunks: int | None = None) -> Schedule:
    """Make a schedule of equal stages that all train."""
    # A schedule that is made within any limit must at least find the memory of 1F1B.
    caps = (float(ranks),) * ranks if name == "zb-auto" else None
    return make(name, ranks, microbatches, chunks=chunks, caps=caps)
