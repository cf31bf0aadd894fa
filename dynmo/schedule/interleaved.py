"""Interleaved 1F1B (Megatron-LM's): v stages per rank, placed round and round.

The wait of the warm-up is v times shorter than in 1F1B.

    # interleaved-1f1b  ranks=2 microbatches=4 placement=0,1,0,1
    0 | 0F0 0F1 2F0 2F1 0F2 2BW0 0F3 2BW1 2F2 0BW0 2F3 0BW1 2BW2 2BW3 0BW2 0BW3
    1 | 1F0 1F1 3F0 3BW0 3F1 3BW1 1F2 1BW0 1F3 1BW1 3F2 3BW2 3F3 3BW3 1BW2 1BW3

Microbatches go in groups of p. A group passes all stages of a rank one after the other, forwards
from the lowest, backwards from the highest. Without links the bubble is that of 1F1B divided by v:
(p - 1)(F + B + W) / v. Rank 0 holds up to (v + 1) p - 1 activations of one stage. Each is a v-th
part of a rank's activation, so they are p + (p - 1) / v whole ones.
"""

from __future__ import annotations

from dynmo.schedule.generators import check_numbers
from dynmo.schedule.op import Kind, Op, Schedule

NAME = "interleaved-1f1b"


def loop_stage_ranks(ranks: int, chunks: int) -> tuple[int, ...]:
    """Place stage s on rank s % ranks: 0, 1, .., p - 1, 0, 1, .."""
    return tuple(range(ranks)) * chunks


def interleaved(ranks: int, microbatches: int, chunks: int, first_trainable: int = 0) -> Schedule:
    """Make interleaved 1F1B, for a multiple of `ranks` microbatches.

    One chunk gives the op order of 1F1B under another name.
    """
    stages = ranks * chunks
    check_numbers(NAME, ranks, microbatches, stages, first_trainable)

    def op(kind: Kind, rank: int, turn: int) -> Op:
        """Return the op that a rank runs as its `turn`-th F or BW."""
        group, step_in_group = divmod(turn, stages)
        chunk, place = divmod(step_in_group, ranks)
        chunk = chunk if kind is Kind.F else chunks - 1 - chunk
        return Op(kind, chunk * ranks + rank, group * ranks + place)

    turns = microbatches * chunks
    rows: list[tuple[Op, ...]] = []
    for rank in range(ranks):
        # One chunk needs no more than 1F1B's warm-up. Several chunks need the way to the last rank
        # and back, and all chunks but the last filled.
        ahead = ranks - 1 - rank if chunks == 1 else 2 * (ranks - 1 - rank) + (chunks - 1) * ranks
        warmup = min(ahead, turns)
        row = [op(Kind.F, rank, turn) for turn in range(warmup)]
        for turn in range(turns):
            if warmup + turn < turns:
                row.append(op(Kind.F, rank, warmup + turn))
            row.append(op(Kind.BW, rank, turn))
        rows.append(tuple(x for x in row if x.kind is Kind.F or x.stage >= first_trainable))
    return Schedule(
        NAME, microbatches, loop_stage_ranks(ranks, chunks), tuple(rows), first_trainable
    )
