"""Collects what each rank did when, for a Perfetto / Chrome trace (`trace_events.py`).

The trace has the last steps before every change of the model or of the placement, the first steps
after it, and the last steps of the run.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from dynmo.cost.layer_cost import LayerCost
from dynmo.files import write_whole
from dynmo.pipeline.trace_events import KINDS, OPTIMIZER, Row, TracedStep, chrome_trace
from dynmo.plan.partition import Layout
from dynmo.runtime.comm.clock import Clock
from dynmo.runtime.comm.headers import TAG_TRACE, check_announced
from dynmo.runtime.comm.rank_group import RankGroup
from dynmo.runtime.engine.executor import Interval
from dynmo.runtime.engine.schedule_maker import Links
from dynmo.runtime.engine.step_reduction import StepRecord

_logger = logging.getLogger(__name__)

_BARRIERS = 9
# A long run with many changes must not fill the memory. The oldest kept steps make room.
_MOST_STEPS = 64


class Tracer:
    """Collects a rank's time intervals.

    `finish` sends them to rank 0, which writes the file.
    """

    def __init__(self, world: RankGroup, clock: Clock, steps: int) -> None:
        self._world, self._clock, self._steps = world, clock, steps
        # A step whose optimizer may still be running: its intervals, and the optimizer's.
        self._last: tuple[TracedStep, list[Interval], tuple[Any, Any] | None] | None = None
        self._recent: deque[tuple[TracedStep, list[Row]]] = deque(maxlen=steps)
        self._kept: deque[tuple[TracedStep, list[Row]]] = deque(maxlen=_MOST_STEPS)
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
        self._settle()
        anchor, since = self._anchor, self._since
        self._anchor, self._since = self._origin()
        later = since + self._clock.elapsed(anchor, self._anchor) - self._since
        for steps in (self._recent, self._kept):
            for _, rows in steps:
                rows[:] = [
                    row._replace(start=row.start - later, end=row.end - later) for row in rows
                ]

    def keep_around(self) -> None:
        """Keeps the steps before and after now, because something changes."""
        self._settle()
        self._kept.extend(self._recent)
        self._recent.clear()
        self._coming = self._steps

    def observe(self, record: StepRecord, layout: Layout, links: Links) -> None:
        """Takes a finished step. The clock must be settled but for its optimizer."""
        output = record.step_output
        if not self._steps or not output.intervals:
            return
        self._take()
        step = TracedStep(
            record.step, record.loss, record.idle_ratio, max(record.spans), layout, links
        )
        self._last = step, output.intervals, output.updated

    def _settle(self) -> None:
        self._clock.settle()
        self._take()

    def _take(self) -> None:
        """Reads the marks of the last step."""
        if self._last is None:
            return
        (step, intervals, updated), self._last = self._last, None
        elapsed, first = self._clock.elapsed, intervals[0]
        if updated is not None:
            intervals = [*intervals, Interval(OPTIMIZER, first.stage, 0, *updated)]
        # Times are added from step to step. CUDA gives the time between two marks in milliseconds
        # of float32. Over an hour these are coarser than an op.
        self._since += elapsed(self._anchor, first.start)
        self._anchor = anchor = first.start
        replica = self._world.rank % step.layout.replicas
        rows: list[Row] = []
        for kind, stage, microbatch, start, end in intervals:
            busy = self._clock.seconds(start, end)
            rows.append(
                Row(
                    step.number,
                    KINDS.index(kind),
                    stage,
                    microbatch,
                    replica,
                    self._since + elapsed(anchor, start),
                    self._since + elapsed(anchor, end),
                    elapsed(start, end) if busy is None else busy,
                )
            )
        to = self._kept if self._coming else self._recent
        self._coming -= bool(self._coming)
        to.append((step, rows))

    def finish(
        self, path: Path | None, costs: Callable[[], Sequence[LayerCost]] = tuple[LayerCost]
    ) -> None:
        """Collects all rows on rank 0, which writes the file. Every rank calls it.

        Args:
            path: The file. None writes nothing.
            costs: Returns the cost of each layer, on all ranks together.
        """
        self._settle()
        self._kept.extend(self._recent)
        self._recent.clear()
        rows, world = [row for _, step in self._kept for row in step], self._world
        own_table = torch.tensor(rows, dtype=torch.float64).reshape(-1, len(Row._fields))
        counts = world.gather(torch.tensor(len(own_table)), "the traces of every rank").tolist()
        layers = costs() if any(counts) else ()
        if world.rank:
            if len(own_table):
                world.wait(world.send(own_table, 0, TAG_TRACE), 0, "room to send its trace")
            return
        tables = [own_table]
        for rank in range(1, world.size):
            table = torch.zeros(counts[rank], len(Row._fields), dtype=torch.float64)
            check_announced(8 * table.numel(), torch.device("cpu"), f"the trace of rank {rank}")
            if len(table):
                world.wait(world.receive(table, rank, TAG_TRACE), rank, "its trace")
            tables.append(table)
        if path is not None and self._steps:
            found = [[Row(*row) for row in table.tolist()] for table in tables]
            trace = chrome_trace(found, [step for step, _ in self._kept], layers)
            try:
                write_whole(path, json.dumps(trace, separators=(",", ":")))
            except OSError as error:  # a lost trace must not end the run
                _logger.warning(f"{path} cannot be written: {error.strerror}")
