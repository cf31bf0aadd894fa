"""The schedules made by hand: GPipe, 1F1B, ZB-H1 and ZB-H2.

ZB-H1 and ZB-H2 are from Zero Bubble, section 2. They are pure functions of p and m. Each takes the
number of ranks, the number of microbatches and the first trainable stage. A rank below that stage
runs forwards only.
"""

from __future__ import annotations

from collections.abc import Callable

from dynmo.errors import ScheduleError
from dynmo.schedule.op import Kind, Op, Schedule

Generator = Callable[[int, int, int], Schedule]


def check_numbers(
    name: str, ranks: int, microbatches: int, stages: int, first_trainable: int
) -> None:
    if ranks < 1 or microbatches < 1:
        raise ScheduleError(
            f"{name}: {ranks} ranks and {microbatches} microbatches; at least 1 of each is needed"
        )
    if not 0 <= first_trainable < stages:
        raise ScheduleError(
            f"{name}: first trainable stage {first_trainable} of {stages} stages; at least the "
            "last stage must train"
        )


def _make(
    name: str,
    ranks: int,
    microbatches: int,
    first_trainable: int,
    row: Callable[[int], list[tuple[Kind, int]]],
) -> Schedule:
    check_numbers(name, ranks, microbatches, ranks, first_trainable)
    forward_only = [(Kind.F, j) for j in range(microbatches)]
    rows = (forward_only if rank < first_trainable else row(rank) for rank in range(ranks))
    ops = tuple(tuple(Op(kind, rank, j) for kind, j in cells) for rank, cells in enumerate(rows))
    return Schedule(name, microbatches, tuple(range(ranks)), ops, first_trainable)


def gpipe(ranks: int, microbatches: int, first_trainable: int = 0) -> Schedule:
    """Make GPipe: all forwards, then all backwards. Every microbatch is in flight at once."""

    def row(rank: int) -> list[tuple[Kind, int]]:
        return [(kind, j) for kind in (Kind.F, Kind.BW) for j in range(microbatches)]

    return _make("gpipe", ranks, microbatches, first_trainable, row)


def one_f_one_b(ranks: int, microbatches: int, first_trainable: int = 0) -> Schedule:
    """Make 1F1B: a warm-up of p - 1 - rank forwards, then one forward and one backward in turn."""

    def row(rank: int) -> list[tuple[Kind, int]]:
        warmup = min(ranks - 1 - rank, microbatches)
        cells = [(Kind.F, j) for j in range(warmup)]
        for i in range(microbatches):
            if warmup + i < microbatches:
                cells.append((Kind.F, warmup + i))
            cells.append((Kind.BW, i))
        return cells

    return _make("1f1b", ranks, microbatches, first_trainable, row)


def _zero_bubble(
    name: str, k: int, ranks: int, microbatches: int, first_trainable: int
) -> Schedule:
    """Make ZB-H1 (k = 1) or ZB-H2 (k = 2).

    W is held back so that in steady state every rank is k (p - 1) microbatches past the first F.
    Over a frozen prefix the pipeline that trains starts at `first_trainable`. No rank upstream of
    it waits for a B, so that stage holds no W back.
    """
    held_back = k * (ranks - 1 - first_trainable)

    def row(rank: int) -> list[tuple[Kind, int]]:
        warmup = k * (ranks - 1 - rank)
        cells = [(Kind.F, j) for j in range(min(warmup, microbatches))]
        weights = 0
        for i in range(microbatches):
            if warmup + i < microbatches:
                cells.append((Kind.F, warmup + i))
            cells.append((Kind.B, i))
            if warmup + i >= held_back:
                cells.append((Kind.W, weights))
                weights += 1
        return cells + [(Kind.W, j) for j in range(weights, microbatches)]

    return _make(name, ranks, microbatches, first_trainable, row)


def zb_h1(ranks: int, microbatches: int, first_trainable: int = 0) -> Schedule:
    """Make ZB-H1: the memory of 1F1B, at most p activations a rank, and a third of its bubble."""
    return _zero_bubble("zb-h1", 1, ranks, microbatches, first_trainable)


def zb_h2(ranks: int, microbatches: int, first_trainable: int = 0) -> Schedule:
    """Make ZB-H2: no bubble if F = B = W, for up to 2p - 1 activations."""
    return _zero_bubble("zb-h2", 2, ranks, microbatches, first_trainable)


GENERATORS: dict[str, Generator] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
}
