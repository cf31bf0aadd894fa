"""A pipeline schedule: the ops of each rank in the order in which they run.

    # zb-h1  ranks=3 microbatches=4 placement=0,1,2
    0 | F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3
    1 | F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
    2 | F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3

F is the forward of one microbatch through one stage. B is the gradient of its input, W the gradient
of its weights, and BW both at once (an ordinary backward). If a rank holds several stages (chunks),
the stage stands before the kind: `3B7`.

Stages below `first_trainable` are a frozen prefix: they have F only. Stage `first_trainable` sends
no gradient upstream.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from dynmo.errors import ScheduleError

if TYPE_CHECKING:
    from dynmo.schedule.graph import Graph, Order


class Kind(StrEnum):
    """The four kinds of work of one microbatch on one stage."""

    F = "F"
    B = "B"
    W = "W"
    BW = "BW"


class Op(NamedTuple):
    """One unit of work: `kind` on `stage` for `microbatch`."""

    kind: Kind
    stage: int
    microbatch: int


class Dependency(NamedTuple):
    """An op that must have ended, and the link that its result crosses.

    Attributes:
        op: The op that must have ended.
        boundary: The link between stages `boundary` and `boundary + 1`, or None.
    """

    op: Op
    boundary: int | None


@dataclass(frozen=True)
class Schedule:
    """The ops of each rank in order.

    Attributes:
        name: Name of the schedule.
        microbatches: Microbatches of a step.
        stage_ranks: Rank that holds each stage.
        ops: The ops of each rank, in the order in which the rank runs them.
        first_trainable: The stages before this one run F only.
        credits: How many microbatches a forward-only stage may be ahead of the stage that it
            feeds. It keeps the memory of a frozen prefix bounded. None means the number of ranks.
    """

    name: str
    microbatches: int
    stage_ranks: tuple[int, ...]
    ops: tuple[tuple[Op, ...], ...]
    first_trainable: int = 0
    credits: int | None = None

    @property
    def ranks(self) -> int:
        return len(self.ops)

    @property
    def stages(self) -> int:
        return len(self.stage_ranks)

    @property
    def ahead(self) -> int:
        """The number that `credits` stands for."""
        return self.ranks if self.credits is None else self.credits

    @cached_property
    def fused(self) -> frozenset[tuple[int, int]]:
        """The (stage, microbatch) pairs whose backward is one BW."""
        return frozenset(
            (op.stage, op.microbatch) for row in self.ops for op in row if op.kind is Kind.BW
        )

    @cached_property
    def graph(self) -> Graph:
        """What waits for what."""
        from dynmo.schedule.graph import make_graph  # numba takes a while to import

        return make_graph(self.stage_ranks, self.first_trainable, self.ahead)

    @cached_property
    def waits(self) -> tuple[list[tuple[int, int, int]], ...]:
        """The graph's columns by lane, without the empty places, for loops in Python."""
        lanes = zip(*(column.tolist() for column in self.graph), strict=True)
        return tuple([w for w in zip(*lane, strict=True) if w[0] >= 0] for lane in lanes)

    @cached_property
    def order(self) -> Order:
        """The ops as numbers, for compiled loops."""
        from dynmo.schedule.graph import make_order

        return make_order(self.ops, self.stages, self.graph)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return tuple(s for s, r in enumerate(self.stage_ranks) if r == rank)

    def __str__(self) -> str:
        """Write the readable form shown at the top of this file."""
        header = f"# {self.name}  ranks={self.ranks} microbatches={self.microbatches}"
        header += f" placement={','.join(map(str, self.stage_ranks))}"
        if self.first_trainable:
            header += f" first_trainable={self.first_trainable}"
        if self.credits is not None:
            header += f" credits={self.credits}"
        width, lines = len(str(self.ranks - 1)), [header]
        for rank, row in enumerate(self.ops):
            several = len(self.stages_of(rank)) > 1
            cells = (f"{op.stage if several else ''}{op.kind}{op.microbatch}" for op in row)
            lines.append(f"{rank:>{width}} | {' '.join(cells)}")
        return "\n".join(lines) + "\n"

    def __repr__(self) -> str:
        ranks = f"{self.ranks} rank{'s' * (self.ranks > 1)}"
        return f"Schedule({self.name}, {ranks}, {self.microbatches} microbatches)"


def dependencies(schedule: Schedule, op: Op) -> Iterator[Dependency]:
    """List the ops that must have ended before `op` may start, as `graph.make_graph` says."""
    kinds, n = tuple(Kind), schedule.stages
    for before, lag, boundary in schedule.waits[kinds.index(op.kind) * n + op.stage]:
        kind, stage, j = kinds[before // n], before % n, op.microbatch - lag
        if j >= 0:
            kind = Kind.BW if kind is Kind.B and (stage, j) in schedule.fused else kind
            yield Dependency(Op(kind, stage, j), None if boundary < 0 else boundary)


def validate(schedule: Schedule) -> None:
    """Check that a schedule is complete and can run.

    Every stage must have each op exactly once, on its rank and in microbatch order.

    Raises:
        ScheduleError: An op is missing, doubled or out of place, or ranks wait for each other in a
            circle.
    """
    if fault := next(_faults(schedule), None):
        raise ScheduleError(f"{schedule.name}: {fault}")
    check_order(schedule)


def _faults(schedule: Schedule) -> Iterator[str]:
    m, ranks, n = schedule.microbatches, schedule.ranks, schedule.stages
    placement, first = schedule.stage_ranks, schedule.first_trainable
    if m < 1:
        yield f"{m} microbatches; at least 1 is needed"
    if any(not 0 <= rank < ranks for rank in placement):
        yield f"placement {placement} names a rank outside 0..{ranks - 1}"
    if len(set(placement)) < ranks:
        yield f"placement {placement} leaves one of {ranks} ranks without a stage"
    if not 0 <= first < n:
        yield f"first trainable stage {first} of {n} stages"
    # Number of F, B and W seen on each stage. Each kind must come in microbatch order and reach m.
    seen = Counter[tuple[int, Kind]]()
    for rank, row in enumerate(schedule.ops):
        for op in row:
            kind, stage, j = op
            if not 0 <= stage < n or placement[stage] != rank:
                yield f"rank {rank} runs {name(op)}, but the stage is not placed there"
            if kind is not Kind.F and stage < first:
                yield f"{name(op)} on a frozen stage (first trainable is {first})"
            for part in (Kind.B, Kind.W) if kind is Kind.BW else (kind,):
                due = seen[stage, part]
                if j != due:
                    yield f"rank {rank} runs {name(op)} where microbatch {due} of {part} is due"
                seen[stage, part] += 1
    for stage, kind in product(range(n), (Kind.F, Kind.B, Kind.W)):
        count, expected = seen[stage, kind], m * (kind is Kind.F or stage >= first)
        if count != expected:
            yield f"stage {stage} has {count} of {expected} {kind} ops"


def check_order(schedule: Schedule) -> None:
    """Check that no ranks wait for each other in a circle.

    Raises:
        ScheduleError: They do. The message names the first op that can never run.
    """
    order = schedule.order
    if len(order.rows) == len(order.lanes):
        return
    flat = [(rank, op) for rank, row in enumerate(schedule.ops) for op in row]
    done = {flat[int(at)][1] for at in order.at}
    rank, op = next((rank, op) for rank, op in flat if op not in done)
    missing = next(d.op for d in dependencies(schedule, op) if d.op not in done)
    raise ScheduleError(
        f"{schedule.name}: rank {rank} waits at {name(op)} for {name(missing)}, which never "
        "runs: a circle"
    )


def name(op: Op) -> str:
    """Describe an op for messages: `B of microbatch 3 on stage 1`."""
    return f"{op.kind} of microbatch {op.microbatch} on stage {op.stage}"
