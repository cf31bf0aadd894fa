"""Schedule -> one program per rank: the ops with the messages between them, deadlock-free by construction.

    rank 0 | F0 F0>1 F1 F1>1 <B0 BW0 <B1 BW1          `F0>1` sends the activation of microbatch 0 to stage 1,
    rank 1 | <F0 F0 B0 B0>0 <F1 F1 B1 B1>0 W0 W1      `<B0` takes the gradient of microbatch 0

One channel is one boundary and one direction; its messages are in microbatch order on both sides, because every stage runs F
and B in microbatch order. Neighbouring stages on one rank hand over in memory and have no channel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from dynmo.errors import ScheduleError
from dynmo.schedule.op import Kind, Op, Schedule, dependencies, validate


class Direction(StrEnum):
    ACTIVATION = "activation"
    GRADIENT = "gradient"


class Channel(NamedTuple):
    """Messages across `boundary` (between stages `boundary` and `boundary + 1`) in one direction, from rank `source` to `target`."""

    boundary: int
    direction: Direction
    source: int
    target: int


class Compute(NamedTuple):
    """Run one op. What it needs is at hand."""

    op: Op


class Send(NamedTuple):
    """Hand the result of `stage` for `microbatch` to the channel; never waits longer than for a place in its depth."""

    channel: Channel
    stage: int
    microbatch: int


class Receive(NamedTuple):
    """Wait for the channel's next message, which `stage` needs for `microbatch`."""

    channel: Channel
    stage: int
    microbatch: int


Instruction = Compute | Send | Receive


@dataclass(frozen=True)
class Program:
    """What one rank does in one step. `depth` is how many messages of a channel may be sent and not yet taken."""

    rank: int
    stages: tuple[int, ...]
    microbatches: int
    first_trainable: int
    instructions: tuple[Instruction, ...]
    depth: dict[Channel, int]

    @property
    def incoming(self) -> tuple[Channel, ...]:
        return tuple(c for c in self.depth if c.target == self.rank)

    @property
    def outgoing(self) -> tuple[Channel, ...]:
        return tuple(c for c in self.depth if c.source == self.rank)


def fuse(schedule: Schedule) -> Schedule:
    """Turns B directly followed by W of the same microbatch into BW where no upstream rank waits for that B: on the first
    trainable stage. There is nothing to gain by deferring that W, and its inputs are still in the cache."""
    rows: list[tuple[Op, ...]] = []
    for row in schedule.ops:
        out: list[Op] = []
        for op in row:
            before = out[-1] if out else None
            if op.kind is Kind.W and op.stage == schedule.first_trainable and before == Op(Kind.B, op.stage, op.microbatch):
                out[-1] = Op(Kind.BW, op.stage, op.microbatch)
            else:
                out.append(op)
        rows.append(tuple(out))
    return Schedule(schedule.name, schedule.microbatches, schedule.placement, tuple(rows), schedule.first_trainable, schedule.credits)


def lower(schedule: Schedule) -> tuple[Program, ...]:
    """One program per rank. Raises ScheduleError if the schedule does not hold together or its messages could wait in a circle."""
    validate(schedule)
    fused = fuse(schedule)
    return _programs(fused)


def lower_forward(placement: tuple[int, ...], ranks: int, microbatches: int) -> tuple[Program, ...]:
    """Forward only, for evaluation: every stage is a frozen prefix. A rank with several stages takes what can be there first."""
    order = sorted((s + j, j, s) for s in range(len(placement)) for j in range(microbatches))
    rows = tuple(tuple(Op(Kind.F, s, j) for _, j, s in order if placement[s] == rank) for rank in range(ranks))
    return _programs(Schedule("forward", microbatches, placement, rows, first_trainable=len(placement)))


def _programs(schedule: Schedule) -> tuple[Program, ...]:
    depth = _depths(schedule)
    programs: list[Program] = []
    for rank, row in enumerate(schedule.ops):
        instructions: list[Instruction] = []
        for op in row:
            instructions.extend(_around(schedule, op))
        own = {c: d for c, d in depth.items() if rank in (c.source, c.target)}
        programs.append(Program(rank, schedule.stages_of(rank), schedule.microbatches, schedule.first_trainable, tuple(instructions), own))
    check(tuple(programs))
    return tuple(programs)


def _channel(schedule: Schedule, boundary: int, direction: Direction) -> Channel | None:
    lower_rank, upper_rank = schedule.placement[boundary], schedule.placement[boundary + 1]
    if lower_rank == upper_rank:
        return None
    if direction is Direction.ACTIVATION:
        return Channel(boundary, direction, lower_rank, upper_rank)
    return Channel(boundary, direction, upper_rank, lower_rank)


def _around(schedule: Schedule, op: Op) -> Iterator[Instruction]:
    """What must be taken before an op, the op, and what it hands on."""
    direction = Direction.ACTIVATION if op.kind is Kind.F else Direction.GRADIENT
    if op.kind is not Kind.W:
        for before, boundary in dependencies(schedule, op):
            # A credit (F waiting for a later stage's F) is kept by the channel's depth; it is not a message.
            if boundary is None or (op.kind is Kind.F and before.stage > op.stage):
                continue
            channel = _channel(schedule, boundary, direction)
            if channel is not None:
                yield Receive(channel, op.stage, op.microbatch)
    yield Compute(op)
    if op.kind is Kind.F and op.stage + 1 < schedule.stages:
        channel = _channel(schedule, op.stage, Direction.ACTIVATION)
    elif op.kind in (Kind.B, Kind.BW) and op.stage > schedule.first_trainable:
        channel = _channel(schedule, op.stage - 1, Direction.GRADIENT)
    else:
        return
    if channel is not None:
        yield Send(channel, op.stage, op.microbatch)


def _depths(schedule: Schedule) -> dict[Channel, int]:
    """How far each channel's sender may be ahead: as far as the schedule lets it, but `credits` behind a forward-only stage."""
    depths: dict[Channel, int] = {}
    credits = schedule.ranks if schedule.credits is None else schedule.credits
    for boundary in range(schedule.stages - 1):
        channel = _channel(schedule, boundary, Direction.ACTIVATION)
        if channel is not None:
            depths[channel] = max(1, credits) if boundary < schedule.first_trainable else schedule.microbatches
        channel = _channel(schedule, boundary, Direction.GRADIENT)
        if channel is not None and boundary + 1 > schedule.first_trainable:
            depths[channel] = schedule.microbatches
    return depths


def check(programs: tuple[Program, ...]) -> None:
    """Runs the programs on paper with channels of their depths. Raises ScheduleError where ranks would wait for each other for ever."""
    position = [0] * len(programs)
    sent: dict[Channel, int] = {}
    taken: dict[Channel, int] = {}
    moved = True
    while moved:
        moved = False
        for program in programs:
            row = program.instructions
            while position[program.rank] < len(row):
                instruction = row[position[program.rank]]
                if isinstance(instruction, Send):
                    channel = instruction.channel
                    if sent.get(channel, 0) - taken.get(channel, 0) >= program.depth[channel]:
                        break
                    if sent.get(channel, 0) != instruction.microbatch:
                        raise ScheduleError(f"message {instruction.microbatch} on {describe(channel)} is sent out of order")
                    sent[channel] = sent.get(channel, 0) + 1
                elif isinstance(instruction, Receive):
                    channel = instruction.channel
                    if sent.get(channel, 0) <= taken.get(channel, 0):
                        break
                    if taken.get(channel, 0) != instruction.microbatch:
                        raise ScheduleError(f"message {instruction.microbatch} on {describe(channel)} is taken out of order")
                    taken[channel] = taken.get(channel, 0) + 1
                position[program.rank] += 1
                moved = True
    for program in programs:
        if position[program.rank] < len(program.instructions):
            waiting = program.instructions[position[program.rank]]
            assert not isinstance(waiting, Compute)
            raise ScheduleError(
                f"rank {program.rank} would wait for ever for microbatch {waiting.microbatch} on {describe(waiting.channel)}"
            )
    for channel, count in sent.items():
        if taken.get(channel, 0) != count:
            raise ScheduleError(f"{count - taken.get(channel, 0)} messages on {describe(channel)} are never taken")


def describe(channel: Channel) -> str:
    """For messages: `the activations from rank 0 to rank 1`."""
    return f"the {channel.direction}s from rank {channel.source} to rank {channel.target}"
