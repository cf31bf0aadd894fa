"""W ahead of its time: a rank that waits for a message runs pieces of later W's.

    program     F3 B2 <F4 F4 B3 W2          `<F4` takes a message that is late
    whole       F3 B2 ....... F4 B3 W2
    in pieces   F3 B2 w2 w2 . F4 B3 w2      a piece: one deferred weight gradient; W runs the rest

The program says by when a W must have run, so memory is never more than it says. Pieces run in the
program's order of W's, however late messages are. Every gradient is therefore summed over its
microbatches in the same order. Replicas reduce their layers in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping

from dynmo.runtime.layer.stage import Stage
from dynmo.schedule.lowering import Compute, Instruction
from dynmo.schedule.op import Kind, Op


class WeightGradQueue:
    """The W's of one run of a program over this rank's stages."""

    def __init__(self, instructions: Iterable[Instruction], stages: Mapping[int, Stage]) -> None:
        self._stages = stages
        ops = (i.op for i in instructions if isinstance(i, Compute))
        self._due = deque(op for op in ops if op.kind in (Kind.W, Kind.BW))
        self._ready: set[Op] = set()
        # The first due W, once it has begun.
        self._begun: Iterator[None] | None = None

    def after(self, op: Op) -> None:
        """Notes that the program has run this op, other than a W."""
        if op.kind is Kind.B:
            self._ready.add(Op(Kind.W, op.stage, op.microbatch))
        elif op.kind is Kind.BW:
            assert self._due[0] == op, "all before it in the program has run"
            self._due.popleft()

    @property
    def any(self) -> bool:
        """Whether there is a W whose B has run."""
        return bool(self._due) and self._due[0] in self._ready

    def run_one(self) -> Op | None:
        """Runs the next piece. Returns its W, or None if there is none."""
        while self.any:
            op = self._due[0]
            if self._begun is None:
                self._begun = self._stages[op.stage].partial_weights(op.microbatch)
            for _ in self._begun:
                return op
            self._end(op)
        return None

    def run_rest(self, op: Op) -> None:
        """Runs the rest of this W, to which the program has come."""
        if op not in self._ready:
            return
        if self._begun is None:
            self._stages[op.stage].backward_weight(op.microbatch)
        else:
            deque(self._begun, maxlen=0)
        self._end(op)

    def _end(self, op: Op) -> None:
        self._due.popleft()
        self._ready.remove(op)
        self._begun = None
