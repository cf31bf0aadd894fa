"""Schedules made by hand: a warm-up of forwards, then one forward and one backward in turn.

They differ in the length of the warm-up, and in whether W is apart from B. ZB-H1 and ZB-H2 are from
Zero Bubble, section 2. They hold W back, so that in steady state every rank is as many microbatches
past the first F as the first rank is at its first B. Over a frozen prefix the pipeline that trains
starts at `first_trainable`. No rank upstream of it waits for a B, so that stage holds no W back.

Interleaved 1F1B is Megatron-LM's: v stages per rank, placed round and round. The wait of the
warm-up is v times shorter than in 1F1B.

    # interleaved-1f1b  ranks=2 microbatches=4 placement=0,1,0,1
    0 | 0F0 0F1 2F0 2F1 0F2 2BW0 0F3 2BW1 2F2 0BW0 2F3 0BW1 2BW2 2BW3 0BW2 0BW3
    1 | 1F0 1F1 3F0 3BW0 3F1 3BW1 1F2 1BW0 1F3 1BW1 3F2 3BW2 3F3 3BW3 1BW2 1BW3

Microbatches go in groups of p. A group passes all stages of a rank one after the other, forwards
from the lowest, backwards from the highest. Without links the bubble is that of 1F1B divided by v:
(p - 1)(F + B + W) / v. Rank 0 holds up to (v + 1) p - 1 activations of one stage. Each is a v-th
part of a rank's activation, so they are p + (p - 1) / v whole ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from dynmo.schedule.op import Kind, Op, Schedule

if TYPE_CHECKING:
    from dynmo.schedule.graph import Ints


def v_stage_ranks(ranks: int) -> tuple[int, ...]:
    """Place stages down and up again: 0, 1, .., p - 1, p - 1, .., 1, 0."""
    return (*range(ranks), *reversed(range(ranks)))


@lru_cache(maxsize=32)
def by_hand(
    name: str,
    ranks: int,
    microbatches: int,
    warmup: Callable[[int, int, int, int], int],
    splits: bool,
    chunks: int,
    first_trainable: int,
) -> Schedule:
    """Make a schedule that does not depend on costs. Stage s is on rank s % ranks.

    Args:
        name: Name of the schedule.
        ranks: Number of pipeline ranks.
        microbatches: Microbatches of a step, a multiple of `ranks` if there are several chunks.
        warmup: The number of F's before the first F and backward in turn. It takes the number of
            ranks, microbatches, chunks, and the rank.
        splits: Whether W is apart from B.
        chunks: Stages per rank.
        first_trainable: The stages before this one run F only.
    """
    stages = ranks * chunks
    ahead = [warmup(ranks, microbatches, chunks, rank) for rank in range(ranks)]
    held = [ahead[first_trainable % ranks] - own for own in ahead]
    kinds = (Kind.F, Kind.B, Kind.W) if splits else (Kind.F, Kind.BW)
    orders: list[list[int]] = in_turn(microbatches * chunks, ahead, held).tolist()
    rows: list[tuple[Op, ...]] = []
    for rank, row in enumerate(orders):
        ops, turns = list[Op](), [iter(range(stages * microbatches)) for _ in kinds]
        for which in row:
            if which == len(kinds):  # a W, which BW has in it
                continue
            group, step_in_group = divmod(next(turns[which]), stages)
            chunk, place = divmod(step_in_group, ranks)
            stage = (chunks - 1 - chunk if which else chunk) * ranks + rank
            if not which or stage >= first_trainable:
                ops.append(Op(kinds[which], stage, group * ranks + place))
        rows.append(tuple(ops))
    stage_ranks = tuple(range(ranks)) * chunks
    return Schedule(name, microbatches, stage_ranks, tuple(rows), first_trainable)


def in_turn(turns: int, ahead: Sequence[int] | Ints, held: Sequence[int] | Ints) -> Ints:
    """Lays down each rank's order of F's, B's and W's: 0, 1 and 2, [ranks, 3 * turns].

    A rank begins with `ahead` F's. Then an F, a B and a W follow each other. A W comes `held` turns
    after its B.
    """
    begin = np.stack([-np.asarray(ahead), np.zeros_like(ahead), np.maximum(held, 0)], axis=1)
    places = 3 * (begin[:, :, None] + np.arange(turns)) + np.arange(3)[:, None]
    return np.argsort(places.reshape(len(begin), -1), axis=1) // turns
