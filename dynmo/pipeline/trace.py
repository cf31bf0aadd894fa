"""Writes a Perfetto / Chrome trace of each rank's F, B, W, sends and waits.

Open the trace at ui.perfetto.dev. It has the last steps before every change of the model or of the
placement, the first steps after it, and the last steps of the run.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dynmo.files import write_whole
from dynmo.runtime.comm.clock import Clock
from dynmo.runtime.comm.headers import TAG_TRACE, check_announced
from dynmo.runtime.comm.rank_group import RankGroup
from dynmo.runtime.engine.executor import SEND, WAIT, Interval

_logger = logging.getLogger(__name__)

_COLOURS = {
    "F": "thread_state_running",
    "B": "thread_state_iowait",
    "W": "thread_state_runnable",
    "BW": "thread_state_iowait",
    WAIT: "grey",
    SEND: "yellow",
}
_KINDS = list(_COLOURS)
_BARRIERS = 9
# A long run with many changes must not fill the memory. The oldest kept steps make room.
_MOST_STEPS = 64

# One row of the tensor that is sent: step, kind, stage, microbatch, start, end (seconds since the
# common origin).
Row = tuple[int, int, int, int, float, float]


class Tracer:
    """Collects a rank's time intervals.

    `finish` sends them to rank 0, which writes the file.
    """

    def __init__(
        self, world: RankGroup, clock: Clock, steps: int, stage_ranks: tuple[int, ...] | None = None
    ) -> None:
        self._world, self._clock, self._steps, self._stage_ranks = world, clock, steps, stage_ranks
        self._recent: deque[list[Row]] = deque(maxlen=steps)
        self._kept: deque[list[Row]] = deque(maxlen=_MOST_STEPS)
        self._coming = 0
        self._anchor, self._since = self._origin()

    def _origin(self) -> tuple[Any, float]:
        """Returns a mark of this rank's clock, and its seconds since the common origin."""
        world, clock = self._world, self._clock
        # All ranks leave a barrier within a link's latency, unless one is held up just then. The
        # median of several barriers is the common time zero.
        marks: list[Any] = []
        for _ in range(_BARRIERS):
            world.barrier("the trace's time zero")
            marks.append(clock.mark())
        clock.settle()
        seconds = [clock.elapsed(marks[0], mark) for mark in marks]
        table = world.gather(torch.tensor(seconds, dtype=torch.float64), "the trace's time zero")
        return marks[0], float((table[0] - table[world.rank]).median())

    def renew(self) -> None:
        """Finds the common origin of a changed set of ranks.

        All ranks call it together. Newcomers make a tracer instead.
        """
        anchor, since = self._anchor, self._since
        self._anchor, self._since = self._origin()
        later = since + self._clock.elapsed(anchor, self._anchor) - self._since
        for rows in (self._recent, self._kept):
            moved = [[(*row[:4], row[4] - later, row[5] - later) for row in each] for each in rows]
            rows.clear()
            rows.extend(moved)

    def keep_around(self) -> None:
        """Keeps the steps before and after now, because something changes."""
        self._kept.extend(self._recent)
        self._recent.clear()
        self._coming = self._steps

    def observe(self, step: int, slices: Sequence[Interval]) -> None:
        """Takes the intervals of a finished step. The clock must be settled."""
        if not self._steps or not slices:
            return
        elapsed = self._clock.elapsed
        # Times are added from step to step. CUDA gives the time between two marks in milliseconds
        # of float32. Over an hour these are coarser than an op.
        self._since += elapsed(self._anchor, slices[0].start)
        self._anchor = anchor = slices[0].start
        rows: list[Row] = [
            (
                step,
                _KINDS.index(s.kind),
                s.stage,
                s.microbatch,
                self._since + elapsed(anchor, s.start),
                self._since + elapsed(anchor, s.end),
            )
            for s in slices
        ]
        if self._coming:
            self._coming -= 1
            self._kept.append(rows)
        else:
            self._recent.append(rows)

    def finish(self, path: Path | None) -> None:
        """Collects all rows on rank 0, which writes the file. Every rank calls it."""
        self._kept.extend(self._recent)
        rows = [row for step in self._kept for row in step]
        own_table, world = torch.tensor(rows, dtype=torch.float64).reshape(-1, 6), self._world
        counts = world.gather(torch.tensor(len(own_table)), "the traces of every rank").tolist()
        if world.rank:
            if len(own_table):
                world.wait(world.send(own_table, 0, TAG_TRACE), 0, "room to send its trace")
            return
        tables = [own_table]
        for rank in range(1, world.size):
            check_announced(counts[rank] * 6 * 8, torch.device("cpu"), f"the trace of rank {rank}")
            table = torch.zeros(counts[rank], 6, dtype=torch.float64)
            if len(table):
                world.wait(world.receive(table, rank, TAG_TRACE), rank, "its trace")
            tables.append(table)
        if path is not None and self._steps:
            events = chrome_trace([table.tolist() for table in tables], self._stage_ranks)
            try:
                write_whole(path, json.dumps(events))
            except OSError as error:  # a lost trace must not end the run
                _logger.warning(f"{path} cannot be written: {error.strerror}")


def chrome_trace(
    tables: Sequence[Sequence[Sequence[float]]], stage_ranks: Sequence[int] | None = None
) -> dict[str, Any]:
    """Converts the rows of every rank to the Trace Event Format.

    Each rank is a thread, and so is each slice of a GPU. Times are in microseconds.

    Args:
        tables: Rows of each process.
        stage_ranks: The slice that holds each stage. None if a process is one rank.
    """
    slices = 1 if stage_ranks is None else max(stage_ranks) + 1
    names = [("thread_name", rank, f"rank {rank}") for rank in range(slices * len(tables))]
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": name, "pid": 0, "tid": thread, "args": {"name": text}}
        for name, thread, text in [*names, ("process_name", 0, "dynmo")]
    ]
    for process, rows in enumerate(tables):
        for step, code, stage, microbatch, start, end in rows:
            kind, slice_ = _KINDS[int(code)], stage_ranks[int(stage)] if stage_ranks else 0
            # Both ends are rounded, not the length. Otherwise neighbours could overlap, and viewers
            # would show them nested.
            ts, stop = round(start * 1e6, 1), round(end * 1e6, 1)
            events.append(
                {
                    "ph": "X",
                    "pid": 0,
                    "tid": slice_ * len(tables) + process,
                    "name": f"{kind}{' ' * (kind in (WAIT, SEND))}{int(microbatch)}",
                    "cat": kind,
                    "cname": _COLOURS[kind],
                    "ts": ts,
                    "dur": round(stop - ts, 1),
                    "args": {"step": int(step), "stage": int(stage), "microbatch": int(microbatch)},
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
