"""Writes what ranks did in the Trace Event Format, beside what the schedule had planned.

    steps      a span for each step, with its loss, idle share and makespan
    measured   a row for each rank: F, B, W, sends, waits, sums over ranks, the optimizer
    planned    the same order of F, B and W on the simulator. An op takes the median of its stage in
               this step, and a message the time of its link.

An arrow leads from a pass to the one on another rank that uses its result.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, count, groupby
from statistics import median
from typing import Any, NamedTuple

from dynmo.cost.costs_file import Profile
from dynmo.cost.layer_cost import Costs, LayerCost, StageCost
from dynmo.errors import ScheduleError
from dynmo.plan.partition import Layout
from dynmo.runtime.engine.executor import SEND, WAIT
from dynmo.runtime.engine.schedule_maker import Links
from dynmo.schedule.op import Kind, Op, Schedule, validate
from dynmo.schedule.simulator import Timeline, simulate

# Kinds beside those of an interval. SUMS lies between the last pass and the optimizer.
OPTIMIZER, SUMS = "optimizer", "sums over ranks"
_STYLES = {
    Kind.F: ("forward", "thread_state_running"),
    Kind.B: ("input gradient", "thread_state_iowait"),
    Kind.W: ("weight gradient", "thread_state_runnable"),
    Kind.BW: ("backward", "thread_state_iowait"),
    WAIT: ("wait", "grey"),
    SEND: ("send", "yellow"),
    OPTIMIZER: ("optimizer", "good"),
    SUMS: (SUMS, "grey"),
}
KINDS: list[str] = list(_STYLES)
_PASSES = frozenset[str](Kind)
_STEPS, _MEASURED, _PLANNED = 1, 2, 3  # processes of the trace
_MOST_RANKS = 10_000


class Row(NamedTuple):
    """One interval of a process, as it is sent. Times are seconds since the common origin.

    Attributes:
        kind: Index in `KINDS`.
        busy: Seconds of it without time that other processes took.
    """

    step: int
    kind: int
    stage: int
    microbatch: int
    replica: int
    start: float
    end: float
    busy: float


class TracedStep(NamedTuple):
    """What all ranks know of a step.

    Attributes:
        span: Seconds from the first to the last op of a rank, on the slowest one.
    """

    number: int
    loss: float
    idle_ratio: float
    span: float
    layout: Layout
    links: Links


class _Pass(NamedTuple):
    """An interval on a track of the trace."""

    track: int
    kind: str
    row: Row


def chrome_trace(
    tables: Sequence[Sequence[Row]],
    steps: Sequence[TracedStep],
    layers: Sequence[LayerCost] = (),
) -> dict[str, Any]:
    """Converts the rows of every process to the Trace Event Format.

    Each rank is a thread, and so is each slice of a GPU. Times are in microseconds.

    Args:
        tables: Rows of each process.
        steps: The steps that the first process knows. Others have measured rows alone.
        layers: Costs of the layers, for the size of messages. Empty: messages take no time.
    """
    known = {step.number: step for step in steps}
    size = len(tables)
    # The origin of time is the last change of the ranks. Perfetto drops what came before its zero.
    before = min([0.0, *(row.start for row in chain(*tables))])
    passes = [
        _Pass(
            process + size * _slice(row, known),
            KINDS[int(row.kind)],
            row._replace(start=row.start - before, end=row.end - before),
        )
        for process, table in enumerate(tables)
        for row in table
    ]
    passes.sort(key=lambda x: x.row.step)
    events = list(_names(max((x.track for x in passes), default=size - 1) + 1))
    arrows, free = count(), dict[int, float]()
    groups = [list(found) for _, found in groupby(passes, key=lambda x: x.row.step)]
    starts = [min(x.row.start for x in own) for own in groups]
    for own, start, until in zip(groups, starts, [*starts, math.inf][1:], strict=True):
        events += _events(_MEASURED, [*own, *_sums(own)], arrows)
        step = known.get(int(own[0].row.step))
        planned = [] if step is None else _planned(step, own, layers, start, free)
        free |= {x.track: x.row.end for x in planned}
        events += _events(_PLANNED, planned, arrows)
        if step is not None:
            # A rank may begin a step before another one has ended the step before.
            end = min(until, max(x.row.end for x in own))
            events += _figures(step, own, planned, (start, end))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _slice(row: Row, steps: Mapping[int, TracedStep]) -> int:
    """Returns which slice of its GPU has the row's stage."""
    step = steps.get(int(row.step))
    return step.layout.stage_ranks[int(row.stage)] if step and step.layout.sliced else 0


def _names(ranks: int) -> Iterator[dict[str, Any]]:
    for process, name in ((_STEPS, "steps"), (_MEASURED, "measured"), (_PLANNED, "planned")):
        yield _named("process", name, pid=process)
        threads = ["step"] if process == _STEPS else [f"rank {rank}" for rank in range(ranks)]
        for thread, text in enumerate(threads):
            yield _named("thread", text, pid=process, tid=_thread(process, thread))


def _named(what: str, name: str, **place: int) -> dict[str, Any]:
    return {"ph": "M", "name": f"{what}_name", **place, "args": {"name": name}}


def _thread(process: int, track: int) -> int:
    """Viewers show the number, and want another one in each process."""
    return process * _MOST_RANKS + track


def _sums(passes: Iterable[_Pass]) -> Iterator[_Pass]:
    """Yields the time of each track between its last pass and its optimizer."""
    ends = dict[int, float]()
    for track, kind, row in passes:
        if kind != OPTIMIZER:
            ends[track] = max(row.end, ends.get(track, row.end))
    for track, kind, row in passes:
        if kind == OPTIMIZER and row.start > ends.get(track, math.inf):
            yield _Pass(track, SUMS, row._replace(start=ends[track], end=row.start))


# -- the plan ---


def _planned(
    step: TracedStep,
    passes: Sequence[_Pass],
    layers: Sequence[LayerCost],
    start: float,
    free: Mapping[int, float],
) -> list[_Pass]:
    """Returns the passes as planned. Empty if a rank of the step has left, or none was known.

    Args:
        start: When the step began. A plan that is longer than its step delays the next one.
        free: When each track is free of the plans before.
    """
    layout, planned = step.layout, list[_Pass]()
    for replica in range(layout.replicas):
        own = [x for x in passes if x.row.replica == replica and x.kind in _PASSES]
        timeline = _replayed(step, own, layers)
        if timeline is None:
            return []
        tracks = {layout.stage_ranks[int(x.row.stage)]: x.track for x in own}
        for rank, spans in enumerate(timeline.ranks):
            start = max(start, free.get(tracks[rank], start) - spans[0].start)
            planned += [
                _Pass(
                    tracks[rank],
                    op.kind,
                    Row(step.number, 0, *op[1:], replica, begin, end, end - begin),
                )
                for op, begin, end in spans
            ]
    return [
        x._replace(row=x.row._replace(start=start + x.row.start, end=start + x.row.end))
        for x in planned
    ]


def _replayed(
    step: TracedStep, passes: Sequence[_Pass], layers: Sequence[LayerCost]
) -> Timeline | None:
    """Replays the order of a replica's passes. None if some of them are missing."""
    layout = step.layout
    ops: list[list[Op]] = [[] for _ in range(layout.ranks)]
    seconds = defaultdict[tuple[int, str], list[float]](list)
    for _, kind, row in sorted(passes, key=lambda x: x.row.start):
        stage = int(row.stage)
        ops[layout.stage_ranks[stage]].append(Op(Kind(kind), stage, int(row.microbatch)))
        seconds[stage, kind].append(row.busy)
    trained = [stage for stage, kind in seconds if kind != Kind.F]
    if not trained:
        return None
    schedule = Schedule(
        layout.schedule,
        layout.microbatches,
        layout.stage_ranks,
        tuple(map(tuple, ops)),
        min(trained),
    )
    stages = range(schedule.stages)
    links = Profile((), (), links=tuple(step.links.items())).boundaries(layout.stage_ranks)
    ends = accumulate(layout.partition.counts[:-1])
    costs = Costs(
        tuple(_stage_cost(seconds, stage) for stage in stages),
        tuple(
            link.seconds(layers[end - 1].output_bytes) if layers else 0.0
            for link, end in zip(links, ends, strict=True)
        ),
    )
    try:
        validate(schedule)
        return simulate(schedule, costs)
    except ScheduleError:
        return None


def _stage_cost(seconds: Mapping[tuple[int, str], list[float]], stage: int) -> StageCost:
    f, b, w, whole = (median(seconds.get((stage, kind), [0.0])) for kind in Kind)
    return StageCost(f, b or whole / 2, w or whole / 2)


# -- events ---


def _events(
    process: int, passes: Sequence[_Pass], arrows: Iterator[int]
) -> Iterator[dict[str, Any]]:
    """Yields passes of one step, and an arrow for each message between ranks."""
    for x in passes:
        yield _event(process, x)
    backward = Kind.B, Kind.BW
    at = {
        (x.kind in backward, x.row.replica, x.row.stage, x.row.microbatch): x
        for x in passes
        if x.kind in (Kind.F, *backward)
    }
    for (is_backward, replica, stage, microbatch), source in at.items():
        target = at.get((is_backward, replica, stage + (-1 if is_backward else 1), microbatch))
        if target is None or target.track == source.track:
            continue
        number, name = next(arrows), "gradient" if is_backward else "activation"
        for phase, x in (("s", source), ("f", target)):
            yield {
                "ph": phase,
                "pid": process,
                "tid": _thread(process, x.track),
                "name": name,
                "cat": "message",
                "id": number,
                "ts": round(x.row.start * 1e6, 3),
                **({"bp": "e"} if phase == "f" else {}),
            }


def _event(process: int, x: _Pass) -> dict[str, Any]:
    (name, colour), row = _STYLES[x.kind], x.row
    ts, stop = _micro(row.start, row.end)
    event = {
        "ph": "X",
        "pid": process,
        "tid": _thread(process, x.track),
        "name": name,
        "cat": f"planned {x.kind}" if process == _PLANNED else x.kind,
        "cname": colour,
        "ts": ts,
        "dur": round(stop - ts, 3),
        "args": {"step": int(row.step), "stage": int(row.stage)},
    }
    if x.kind not in (OPTIMIZER, SUMS):
        event["name"] = f"{name} {int(row.microbatch)}"
        event["args"]["microbatch"] = int(row.microbatch)
    if process == _MEASURED and x.kind in _PASSES:
        # The thread's own time in it. Viewers want a start, too, which nothing reads.
        event |= {"tts": ts, "tdur": round(row.busy * 1e6, 3)}
    return event


def _micro(start: float, end: float) -> tuple[float, float]:
    # Both ends are rounded, not the length. Otherwise neighbours could overlap, and viewers would
    # show them nested.
    return round(start * 1e6, 3), round(end * 1e6, 3)


def _figures(
    step: TracedStep,
    measured: Sequence[_Pass],
    planned: Sequence[_Pass],
    ends: tuple[float, float],
) -> Iterator[dict[str, Any]]:
    """Yields the span of a step with its figures, and counters of them."""
    ts, stop = _micro(*ends)
    idle = {"measured": step.idle_ratio}
    length = {"measured": _makespan(x for x in measured if x.kind != OPTIMIZER)}
    if planned:
        length["planned"] = _makespan(planned)
        idle["planned"] = _idle(planned)
    args: dict[str, Any] = {"step": step.number, "span ms": step.span * 1e3}
    loss = {"train": step.loss} if math.isfinite(step.loss) else {}  # JSON has no NaN
    if loss:
        args["loss"] = step.loss
    for name, values in (("idle share", idle), ("makespan ms", length)):
        args |= {f"{name}, {key}": value for key, value in values.items()}
    place = {"pid": _STEPS, "tid": _thread(_STEPS, 0)}
    name, dur = f"step {step.number}", round(stop - ts, 3)
    yield {"ph": "X", **place, "name": name, "cat": "step", "ts": ts, "dur": dur, "args": args}
    for name, values in (("idle share", idle), ("makespan ms", length), ("loss", loss)):
        if values:
            yield {"ph": "C", "pid": _STEPS, "name": name, "ts": ts, "args": values}


def _makespan(passes: Iterable[_Pass]) -> float:
    """Returns the milliseconds from the first op of any rank to the last of any rank."""
    bounds = list(chain.from_iterable((x.row.start, x.row.end) for x in passes))
    return (max(bounds) - min(bounds)) * 1e3


def _idle(passes: Sequence[_Pass]) -> float:
    """Returns 1 - mean over ranks of busy time / the longest span of a rank."""
    tracks = defaultdict[int, list[Row]](list)
    for x in passes:
        tracks[x.track].append(x.row)
    span = max(max(y.end for y in x) - min(y.start for y in x) for x in tracks.values())
    busy = math.fsum(x.row.busy for x in passes)
    return 1 - busy / len(tracks) / span if span else 0.0
