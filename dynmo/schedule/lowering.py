"""Lowers a schedule to one program per rank: ops with their messages.

The programs are free of deadlocks by construction. `F0>1` sends the activation of microbatch 0 to
stage 1, and `<B0` takes the gradient of microbatch 0:

    rank 0 | F0 F0>1 F1 F1>1 <B0 BW0 <B1 BW1
    rank 1 | <F0 F0 B0 B0>0 <F1 F1 B1 B1>0 W0 W1

A channel is one boundary and one direction. Its messages are in microbatch order on both sides,
because every stage runs F and B in microbatch order. Neighbouring stages on one rank hand over in
memory and have no channel.

With post-validation (Zero Bubble, section 4) the step before is not yet final while a program
begins. A `Verdict` says from where on it must be final. All ranks' verdicts together stand as late
as they can: no op before one, on any rank, needs a B or a W of any rank.

    rank 0 | F0 F0>1 F1 F1>1 ? <B0 BW0 <B1 BW1
    rank 1 | <F0 F0 ? B0 B0>0 <F1 F1 B1 B1>0 W0 W1

`?` takes the verdict. If the step before was rolled back, rank 1 discards F1, which rank 0 has sent
already, and both start again.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

from dynmo.cost.layer_cost import uniform_costs
from dynmo.errors import ScheduleError
from dynmo.schedule.op import Kind, Op, Schedule, validate
from dynmo.schedule.simulator import simulate


class Direction(StrEnum):
    ACTIVATION = "activation"
    GRADIENT = "gradient"
    # These two have no boundary: the ranks send them about the end of a step (`routes`).
    PREFIX = "prefix table"
    VERDICT = "verdict"


class Channel(NamedTuple):
    """Messages in one direction between the stages `boundary` and `boundary + 1`."""

    boundary: int
    direction: Direction
    source: int
    target: int


class Compute(NamedTuple):
    """Run one op. Its inputs are at hand.

    Attributes:
        op: The op to run.
        takes: Whether it takes the result of another stage. If not, F takes the batch and B starts
            from the loss.
        to: The stage that takes its result. None if no stage does.
        local: Whether `to` is on the same rank. The result is then handed over in memory.
            Otherwise a `Send` follows.
    """

    op: Op
    takes: bool = False
    to: int | None = None
    local: bool = False


class Send(NamedTuple):
    """Hand the result of `stage` for `microbatch` to the channel.

    It waits only while the channel already holds as many messages as its depth.
    """

    channel: Channel
    stage: int
    microbatch: int


class Receive(NamedTuple):
    """Wait for the channel's next message, which `stage` needs for `microbatch`."""

    channel: Channel
    stage: int
    microbatch: int


class Begun(NamedTuple):
    """Messages of an incoming channel around the verdicts.

    Attributes:
        channel: The incoming channel.
        sent: How many messages are sent before the sender's own verdict.
        taken: How many of them are taken before this rank's verdict.
    """

    channel: Channel
    sent: int
    taken: int


class Verdict(NamedTuple):
    """From here on the step before is final.

    If it was rolled back, the work of this program so far is discarded, with the messages that are
    on their way. The program then starts again.
    """

    begun: tuple[Begun, ...]


Instruction = Compute | Send | Receive | Verdict


@dataclass(frozen=True)
class Program:
    """The work of one rank in one step.

    Attributes:
        depth: How many messages of a channel may be sent and not yet taken.
        varying: The channels whose messages have other shapes from microbatch to microbatch.
    """

    rank: int
    stages: tuple[int, ...]
    microbatches: int
    instructions: tuple[Instruction, ...]
    depth: dict[Channel, int]
    varying: frozenset[Channel] = frozenset()

    @property
    def incoming(self) -> tuple[Channel, ...]:
        return tuple(c for c in self.depth if c.target == self.rank)

    @property
    def outgoing(self) -> tuple[Channel, ...]:
        return tuple(c for c in self.depth if c.source == self.rank)


def fuse(schedule: Schedule) -> Schedule:
    """Turn B directly followed by W of the same microbatch into BW.

    Only a B for which no upstream rank waits is fused. This is so on the first trainable stage.
    Deferring that W gains nothing there, and its inputs are still in the cache.
    """
    rows: list[tuple[Op, ...]] = []
    for row in schedule.ops:
        out = list[Op]()
        for op in row:
            ends_b = op.kind is Kind.W and op.stage == schedule.first_trainable
            if ends_b and out and out[-1] == op._replace(kind=Kind.B):
                out[-1] = op._replace(kind=Kind.BW)
            else:
                out.append(op)
        rows.append(tuple(out))
    return replace(schedule, ops=tuple(rows))


def fold(schedule: Schedule) -> Schedule:
    """Put the same ops on one rank that holds all stages: one row in the order of the clock.

        0 | F0 F1 BW0 BW1              0 | 0F0 0F1 1F0 1B0 0BW0 1F1 1B1 0BW1 1W0 1W1
        1 | F0 B0 F1 B1 W0 W1

    The engine that runs the row hands each op to its rank's own queue (stream). The op waits there
    for its inputs. The ranks' own orders are kept, and no op is handed over after one that waits
    for it. B and W are fused, and a frozen prefix is held back, as on several ranks.
    """
    fused = fuse(schedule)
    # F = B = W: the order decides how early an op is queued, not which ops it waits for.
    timeline = simulate(fused, uniform_costs(fused.stages, 1.0, 1.0, 1.0))
    spans = sorted((x.start, rank, x) for rank, row in enumerate(timeline.ranks) for x in row)
    row, credits = tuple(x.op for _, _, x in spans), fused.ahead
    return replace(fused, stage_ranks=(0,) * fused.stages, ops=(row,), credits=credits)


def lower(
    schedule: Schedule, post_validation: bool = False, varying: Collection[int] = ()
) -> tuple[Program, ...]:
    """Make the programs of a training step.

    Args:
        schedule: The order of the ops on each rank.
        post_validation: Whether each program has a Verdict.
        varying: Boundaries whose messages have other shapes from microbatch to microbatch.
            Boundary b is between the stages b and b + 1.

    Raises:
        ScheduleError: The schedule is inconsistent, or its messages could wait in a circle. Such a
            circle may lie in a step, between two steps, or in a step that is begun again.
    """
    validate(schedule)
    programs = _programs(fuse(schedule), varying)
    if not post_validation:
        return programs
    programs = _with_verdicts(programs)
    check_again(programs)
    return programs


def lower_forward(
    stage_ranks: tuple[int, ...], ranks: int, microbatches: int, varying: Collection[int] = ()
) -> tuple[Program, ...]:
    """Make the programs of an evaluation, which runs forwards only.

    Every stage is a frozen prefix. A rank with several stages runs first what can be there first.
    """
    order = sorted((s + j, j, s) for s in range(len(stage_ranks)) for j in range(microbatches))
    rows = tuple(
        tuple(Op(Kind.F, s, j) for _, j, s in order if stage_ranks[s] == rank)
        for rank in range(ranks)
    )
    schedule = Schedule("forward", microbatches, stage_ranks, rows, len(stage_ranks))
    return _programs(schedule, varying)


def _programs(schedule: Schedule, varying: Collection[int]) -> tuple[Program, ...]:
    depth = depths(schedule)
    # The stage whose result each kind on a stage takes, and the stage that takes its result.
    n, kinds = schedule.stages, tuple(Kind)
    sources = {
        (kinds[lane // n], lane % n): before % n
        for lane, waits in enumerate(schedule.waits)
        for before, lag, _ in waits
        if before % n != lane % n and not lag
    }
    targets = {(kind, source): stage for (kind, stage), source in sources.items()}
    taken = {key: _channel(schedule, key[0], source, key[1]) for key, source in sources.items()}
    given = {key: _channel(schedule, *key, target) for key, target in targets.items()}
    programs, m = list[Program](), schedule.microbatches
    for rank, row in enumerate(schedule.ops):
        instructions: list[Instruction] = []
        for op in row:
            key, j = op[:2], op.microbatch
            if channel := taken.get(key):
                instructions.append(Receive(channel, op.stage, j))
            channel, to = given.get(key), targets.get(key)
            local = to is not None and channel is None
            instructions.append(Compute(op, key in sources, to, local))
            if channel:
                instructions.append(Send(channel, op.stage, j))
        own = {c: d for c, d in depth.items() if rank in (c.source, c.target)}
        changing = frozenset(channel for channel in own if channel.boundary in varying)
        stages = schedule.stages_of(rank)
        programs.append(Program(rank, stages, m, tuple(instructions), own, changing))
    check(tuple(programs))
    return tuple(programs)


Rows = Sequence[Sequence[Instruction]]


def check(programs: tuple[Program, ...], rows: Rows | None = None) -> None:
    """Check the programs, or such rows instead, by a dry run with channels of their depths."""
    rows = rows or [program.instructions for program in programs]
    position, flight = _play(programs, rows)
    for rank, (end, row) in enumerate(zip(position, rows, strict=True)):
        if end < len(row):
            waiting = row[end]
            assert isinstance(waiting, Send | Receive)
            raise ScheduleError(
                f"rank {rank} would wait for ever for microbatch {waiting.microbatch} on "
                f"{describe(waiting.channel)}"
            )
    for channel, left in flight.items():
        if left:
            raise ScheduleError(f"{len(left)} messages on {describe(channel)} are never taken")


def _channel(schedule: Schedule, kind: Kind, source: int, target: int) -> Channel | None:
    """Return the channel between two stages, or None if they are on one rank."""
    ranks = schedule.stage_ranks[source], schedule.stage_ranks[target]
    direction = Direction.ACTIVATION if kind is Kind.F else Direction.GRADIENT
    return None if ranks[0] == ranks[1] else Channel(min(source, target), direction, *ranks)


def depths(schedule: Schedule) -> dict[Channel, int]:
    """Compute how far each channel's sender may be ahead: `credits` behind a forward-only stage."""
    depths, m = dict[Channel, int](), schedule.microbatches
    for s, (low, high) in enumerate(pairwise(schedule.stage_ranks)):
        if low != high and s < schedule.first_trainable:
            depths[Channel(s, Direction.ACTIVATION, low, high)] = max(1, schedule.ahead)
        elif low != high:
            depths[Channel(s, Direction.ACTIVATION, low, high)] = m
            depths[Channel(s, Direction.GRADIENT, high, low)] = m
    return depths


def check_again(programs: tuple[Program, ...]) -> None:
    """Check two steps, with the messages that ranks exchange between them.

    One run assumes that the first step stands, the other that it is rolled back.
    """
    placed = sorted((stage, program.rank) for program in programs for stage in program.stages)
    down, up = routes(tuple(rank for _, rank in placed))
    # The prefix's last rank has the verdict. It may be another than the first on the verdict's way.
    between = [(down[-1], up[0])] if down[-1] != up[0] else []
    for rolled_back in (False, True):
        rows: list[list[Instruction]] = []
        for program in programs:
            rank, parts = program.rank, program.instructions
            at, begun = next((i, x.begun) for i, x in enumerate(parts) if isinstance(x, Verdict))
            head, tail = parts[:at], parts[at + 1 :]
            handed = _passes(between, Direction.VERDICT, rank)
            row = [*head, *tail, *_passes(pairwise(down), Direction.PREFIX, rank)]
            row += [*handed, *head] if rank == down[-1] else [*head, *handed]
            row += _passes(pairwise(up), Direction.VERDICT, rank)
            if rolled_back:
                row += [Receive(c, 0, j) for c, sent, taken in begun for j in range(taken, sent)]
                row += head
            rows.append([*row, *tail])
        check(programs, rows)


def _passes(hops: Iterable[tuple[int, int]], direction: Direction, rank: int) -> list[Instruction]:
    """List the receive from the rank before on a route, and the send to the rank behind."""
    channels = [Channel(-1, direction, *hop) for hop in hops]
    received = [Receive(channel, 0, 0) for channel in channels if channel.target == rank]
    return [*received, *(Send(channel, 0, 0) for channel in channels if channel.source == rank)]


def routes(stage_ranks: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the orders in which the prefix and the verdict pass the ranks at a step's end.

        placement 0 1 2        prefix 0 > 1 > 2    verdict 2 > 1 > 0
        placement 0 1 2 2 1 0  prefix 0 > 1 > 2    verdict 2 > 0 > 1 > 2

    Both are used with post-validation. The prefix goes with the first microbatch's F's and the
    verdict with its B's, so neither delays a rank. A rank whose next F waits for the prefix would
    have to wait for the F of the rank that sends it anyway. The same holds for the verdict and B.
    """
    return tuple(dict.fromkeys(stage_ranks)), tuple(dict.fromkeys(reversed(stage_ranks)))


def _with_verdicts(programs: tuple[Program, ...]) -> tuple[Program, ...]:
    """Put each rank's verdict before the first op that needs a B or a W of any rank.

    Every rank runs as far as it gets while no rank runs a B or a W. Its verdict stands there.
    """
    rows = [program.instructions for program in programs]
    position, _ = _play(programs, rows, runs_backward=False)
    heads = [i for row, end in zip(rows, position, strict=True) for i in row[:end]]
    sent = Counter(i.channel for i in heads if isinstance(i, Send))
    taken = Counter(i.channel for i in heads if isinstance(i, Receive))
    out: list[Program] = []
    for program, row, end in zip(programs, rows, position, strict=True):
        verdict = Verdict(tuple(Begun(c, sent[c], taken[c]) for c in program.incoming))
        out.append(replace(program, instructions=(*row[:end], verdict, *row[end:])))
    return tuple(out)


def _play(
    programs: tuple[Program, ...], rows: Rows, runs_backward: bool = True
) -> tuple[list[int], dict[Channel, deque[int]]]:
    """Run every rank as far as it gets, with channels of the programs' depths.

    Returns how far each rank got, and the messages that are then on their way.
    """
    depth = {channel: depth for program in programs for channel, depth in program.depth.items()}
    position = [0] * len(rows)
    flight: defaultdict[Channel, deque[int]] = defaultdict(deque)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while position[rank] < len(row):
                instruction = row[position[rank]]
                if isinstance(instruction, Compute):
                    if instruction.op.kind is not Kind.F and not runs_backward:
                        break
                elif isinstance(instruction, Send):
                    waiting = flight[instruction.channel]
                    if len(waiting) >= depth.get(instruction.channel, len(waiting) + 1):
                        break
                    waiting.append(instruction.microbatch)
                elif isinstance(instruction, Receive):
                    if not flight[instruction.channel]:
                        break
                    microbatch = flight[instruction.channel].popleft()
                    if microbatch != instruction.microbatch:
                        raise ScheduleError(
                            f"message {microbatch} on {describe(instruction.channel)} comes where "
                            f"microbatch {instruction.microbatch} is waited for"
                        )
                position[rank] += 1
                moved = True
    return position, flight


def describe(channel: Channel) -> str:
    """Describe a channel for messages: `the activations from rank 0 to rank 1`."""
    return f"the {channel.direction}s from rank {channel.source} to rank {channel.target}"
