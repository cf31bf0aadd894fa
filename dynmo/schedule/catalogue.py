"""Every schedule by name: how many stages a rank holds, which rank holds which stage, and the schedule itself.

name               stages a rank   made from           memory of a rank, in activations of all its stages
gpipe              1               p, m                m
1f1b, zb-h1        1               p, m                p
zb-h2              1               p, m                2p - 1
interleaved-1f1b   v (2)           p, m                more than p
zb-auto            1               the stages' costs   what the limit allows
zb-v               2               the stages' costs   p
v-half             2               the stages' costs   about p / 2
v-min              2               the stages' costs   about p / 3
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from dynmo.cost.layer_cost import Costs, uniform_costs
from dynmo.errors import ScheduleError
from dynmo.schedule.bounds import Objective
from dynmo.schedule.generators import GENERATORS, make_schedule
from dynmo.schedule.op import Schedule


class _Entry(NamedTuple):
    """chunks: stages a rank when nothing is said; free: other numbers may be asked for; from_costs: costs shape the schedule."""

    chunks: int = 1
    free: bool = False
    from_costs: bool = False


SCHEDULES: dict[str, _Entry] = {name: _Entry() for name in GENERATORS} | {
    "interleaved-1f1b": _Entry(chunks=2, free=True),
    "zb-auto": _Entry(from_costs=True),
    "zb-v": _Entry(chunks=2, from_costs=True),
    "v-half": _Entry(chunks=2, from_costs=True),
    "v-min": _Entry(chunks=2, from_costs=True),
}


def entry(name: str) -> _Entry:
    """Raises ScheduleError listing the known names."""
    if name not in SCHEDULES:
        raise ScheduleError(f"unknown schedule {name!r}; choose one of {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


def chunks_of(name: str, asked: int | None = None) -> int:
    """Stages a rank under this schedule; `asked` is what the user says, None nothing. Raises ScheduleError where it cannot have so many."""
    known = entry(name)
    if asked is None or asked == known.chunks:
        return known.chunks
    if asked < 1:
        raise ScheduleError(f"{name}: {asked} chunks; a rank holds at least 1 stage")
    if not known.free:
        raise ScheduleError(f"{name} has {known.chunks} stage{'s' * (known.chunks > 1)} a rank, not {asked}; leave chunks out")
    return asked


def placement_of(name: str, ranks: int, chunks: int | None = None) -> tuple[int, ...]:
    """Per stage, the rank that holds it: once through the ranks, round and round (interleaved), or down and up again (V shapes)."""
    count = chunks_of(name, chunks)
    if ranks < 1:
        raise ScheduleError(f"{name}: {ranks} ranks; at least 1 is needed")
    if count == 2 and not SCHEDULES[name].free:
        return (*range(ranks), *reversed(range(ranks)))
    return tuple(range(ranks)) * count


def check_microbatches(name: str, ranks: int, microbatches: int) -> None:
    """Raises ScheduleError where the schedule cannot be made for so many; only interleaving is choosy."""
    if microbatches < 1:
        raise ScheduleError(f"{name}: {microbatches} microbatches; at least 1 is needed")
    if name == "interleaved-1f1b" and microbatches % ranks:
        near = [m for m in (microbatches // ranks * ranks, -(-microbatches // ranks) * ranks) if m]
        raise ScheduleError(f"{name}: {microbatches} microbatches are not a multiple of {ranks} ranks; use {' or '.join(map(str, near))}")


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
    """The schedule called `name`.

    costs: of every stage; None: all alike, F = B = W, no links. caps: the most live memory of each rank, in the costs' unit, for those
    that are made from costs; what the others keep by their nature is checked by who calls. Raises ScheduleError with what would do.
    """
    check_microbatches(name, ranks, microbatches)
    placement = placement_of(name, ranks, chunks)
    if name in GENERATORS:
        return make_schedule(name, ranks, microbatches, first_trainable)
    if name == "interleaved-1f1b":
        from dynmo.schedule.interleaved import interleaved

        return interleaved(ranks, microbatches, chunks_of(name, chunks), first_trainable)
    if costs is None:
        costs = uniform_costs(len(placement), 1.0, 1.0, 1.0)
    if len(costs.stages) != len(placement):
        raise ScheduleError(f"{name} on {ranks} ranks has {len(placement)} stages, but costs are given for {len(costs.stages)}")
    # Compiled code and its library are loaded only where such a schedule is wanted.
    if name == "zb-auto":
        from dynmo.schedule.automatic.zero_bubble import automatic

        return automatic(costs, microbatches, caps=caps, first_trainable=first_trainable, objective=objective)
    from dynmo.schedule.automatic import vshape

    maker: Callable[..., Schedule] = {"zb-v": vshape.zb_v, "v-half": vshape.v_half, "v-min": vshape.v_min}[name]
    return maker(costs, microbatches, caps=caps, first_trainable=first_trainable, objective=objective)


def full_schedule(name: str, ranks: int, microbatches: int, chunks: int | None = None) -> Schedule:
    """A schedule of equal stages that all train."""
    # One that is made within any limit must at least find the memory of 1F1B.
    return make(name, ranks, microbatches, chunks=chunks, caps=(float(ranks),) * ranks if name == "zb-auto" else None)
