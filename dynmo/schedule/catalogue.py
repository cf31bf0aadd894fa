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

`automatic.make.make` makes any of them. "auto" stands for the fastest of `SHAPES`, each with the
placement that is best for it. It is no schedule itself: `planner.shapes` chooses.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias

from dynmo.errors import ScheduleError
from dynmo.schedule.generators import GENERATORS
from dynmo.schedule.interleaved import interleaved, loop_stage_ranks
from dynmo.schedule.op import Schedule


class _Entry(NamedTuple):
    """Stages per rank, whether others may be chosen, and whether costs shape the schedule."""

    chunks: int = 1
    free: bool = False
    from_costs: bool = False


# Microbatches of all ranks together. More would fill the memory before any error comes.
_MOST_CELLS = 1 << 20

SCHEDULES: dict[str, _Entry] = {name: _Entry() for name in GENERATORS} | {
    "interleaved-1f1b": _Entry(chunks=2, free=True),
    "zb-auto": _Entry(from_costs=True),
    "zb-v": _Entry(chunks=2, from_costs=True),
    "v-auto": _Entry(chunks=2, from_costs=True),
    "v-half": _Entry(chunks=2, from_costs=True),
    "v-min": _Entry(chunks=2, from_costs=True),
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
    return loop_stage_ranks(ranks, count)


def v_stage_ranks(ranks: int) -> tuple[int, ...]:
    """Place stages down and up again: 0, 1, .., p - 1, p - 1, .., 1, 0."""
    return (*range(ranks), *reversed(range(ranks)))


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


@lru_cache(maxsize=32)
def make_by_hand(
    name: str, ranks: int, microbatches: int, first_trainable: int = 0, chunks: int | None = None
) -> Schedule:
    """Make a schedule that does not depend on costs.

    Raises:
        ScheduleError: The schedule cannot have these numbers. The message says which it can have.
    """
    count = chunks_of(name, chunks)
    check_microbatches(name, ranks, microbatches)
    if name in GENERATORS:
        return GENERATORS[name](ranks, microbatches, first_trainable)
    return interleaved(ranks, microbatches, count, first_trainable)
