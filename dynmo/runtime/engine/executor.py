"""Interprets a program, op by op, and does nothing else.

No rank arithmetic, no names of schedules.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from dynmo.activity import ACTIVITY
from dynmo.runtime.comm.channels import Transport
from dynmo.runtime.comm.clock import Clock
from dynmo.runtime.engine.batch_check import COMPARED, Hashes, Inputs, StepBatch, is_ragged
from dynmo.runtime.engine.stage_streams import Key, StageStreams
from dynmo.runtime.layer.buffers import BufferSet, Copies
from dynmo.runtime.layer.joint_graph import Tensors
from dynmo.runtime.layer.stage import Stage
from dynmo.schedule.lowering import Compute, Direction, Program, Receive, Send, Verdict
from dynmo.schedule.op import Kind

# Kinds of time beyond the kinds of op: waiting for a message, handing one over.
WAIT, SEND = "wait", "send"


class Interval(NamedTuple):
    """One interval of a rank's step, as marks of its clock: an op, WAIT or SEND."""

    kind: str
    stage: int
    microbatch: int
    start: Any
    end: Any


@dataclass
class StepOutput:
    """Output of one step.

    Attributes:
        losses: Losses of the microbatches, on the last stage.
        hashes: Numbers that tell the batch that this rank was given (`COMPARED`). None if it was
            given none, or if no other rank of its replica could be given another.
        counts: Number of targets that the loss of each microbatch counts, on the last stage.
        work: Operations of this replica's batch, as the caller counts them, on the first stage.
        router_losses: What routers add to the losses, on the last stage of a model that has them.
        undo: Gives buffers and generators of the layers the values from before the step.
        updated: Marks before and after the optimizer. None if it has not run.
    """

    losses: list[Tensor] = field(default_factory=list[Tensor])
    intervals: list[Interval] = field(default_factory=list[Interval])
    hashes: Hashes = (None,) * len(COMPARED)
    counts: Sequence[float] = ()
    work: Tensor | float = 0.0
    router_losses: list[Tensor] = field(default_factory=list[Tensor])
    undo: Callable[[], None] = lambda: None
    updated: tuple[Any, Any] | None = None


class Executor:
    """Runs one rank's program over its stages and channels."""

    def __init__(
        self,
        program: Program,
        stages: Mapping[int, Stage],
        transport: Transport,
        clock: Clock,
        streams: StageStreams,
    ) -> None:
        self.program, self.stages = program, stages
        self.transport, self.clock, self.streams = transport, clock, streams
        self._buffers = [layer.buffers for stage in stages.values() for layer in stage.layers]

    def run(
        self,
        step: int,
        batch: StepBatch,
        training: bool = True,
        is_validated: Callable[[Executor], bool] | None = None,
    ) -> StepOutput:
        # A garbage collection in the middle of a step would hold up every rank downstream. Between
        # steps it holds up none.
        collecting = gc.isenabled()
        gc.disable()
        before = self.copies()
        try:
            ragged = 0 in self.stages and is_ragged(batch.inputs)
            self.transport.open(ragged)
            for stage in self.stages.values():
                stage.begin()
                if ragged:
                    stage.expect_ragged()
            self.streams.fork()
            step_output = _ProgramRun(self, step, batch, training).run(is_validated)
            if step_output is None:
                self.restore(before)
                step_output = _ProgramRun(self, step, batch, training).run(None)
                assert step_output is not None
            self.streams.join()
            self.transport.flush()
            step_output.undo = partial(_restore, self._buffers, before)
            return step_output
        except BaseException:
            self.restore(before)
            self.clear()
            raise
        finally:
            if collecting:
                gc.enable()

    def copies(self) -> list[Copies]:
        """Returns copies of what forwards write to."""
        return [buffers.copies() for buffers in self._buffers]

    def restore(self, copies: list[Copies]) -> None:
        _restore(self._buffers, copies)

    def scale_loss(self, scale: float) -> None:
        """From the next run on, gradients are those of `scale` times the loss."""
        for stage in self.stages.values():
            stage.scale_loss(scale)

    def close(self) -> None:
        self.transport.close()

    def clear(self) -> None:
        for stage in self.stages.values():
            stage.clear()


def _restore(buffers: Sequence[BufferSet], copies: Sequence[Copies]) -> None:
    for each, values in zip(buffers, copies, strict=True):
        each.restore(values)


def _at(batch: Inputs, microbatch: int) -> Tensors:
    assert batch is not None, "a first stage needs inputs"
    inputs = batch[microbatch]
    return (inputs,) if isinstance(inputs, Tensor) else inputs


class _ProgramRun:
    def __init__(
        self,
        executor: Executor,
        step: int,
        batch: StepBatch,
        training: bool,
    ) -> None:
        self._executor = executor
        self._step = step
        self._inputs, self._targets = batch.inputs, batch.targets
        self._training = training
        self._program, self._stages = executor.program, executor.stages
        self._transport = executor.transport
        self._streams = executor.streams
        self._mark = executor.clock.mark
        self._output = StepOutput()
        self._intervals = self._output.intervals
        # Tensors on their way to an op or to a channel, by (direction, stage that needs or made
        # them, microbatch).
        self._arrived: dict[Key, Tensors] = {}
        self._leaving: dict[Key, Tensors] = {}

    def run(self, is_validated: Callable[[Executor], bool] | None) -> StepOutput | None:
        """Runs all instructions.

        Returns None if the program must begin again. Everything except the buffers is then as it
        was at its start.
        """
        for instruction in self._program.instructions:
            ACTIVITY.ticks += 1
            if isinstance(instruction, Compute):
                kind, s, j = instruction.op
                with self._streams.of(s):
                    if kind is Kind.F:
                        start = self._forward(instruction)
                    elif kind is Kind.W:
                        start = self._mark()
                        self._stages[s].backward_weight(j)
                    else:
                        start = self._backward_input(instruction)
                    self._intervals.append(Interval(kind, s, j, start, self._mark()))
            elif isinstance(instruction, Receive):
                self._receive(instruction)
            elif isinstance(instruction, Send):
                self._send(instruction)
            elif is_validated is not None and not self._verdict(instruction, is_validated):
                return None
        return self._output

    def _forward(self, compute: Compute) -> Any:
        """Runs F, and hands its outputs on. Returns the mark of its start."""
        (_, s, j), takes, to, local = compute
        x = self._arrived.pop((Direction.ACTIVATION, s, j)) if takes else _at(self._inputs, j)
        self._streams.need((Direction.ACTIVATION, s, j), x)
        start = self._mark()
        targets = None if to is not None or self._targets is None else self._targets[j]
        y = self._stages[s].forward(j, x, self._step, targets, self._training)
        if to is None:
            # With its graph the loss would live until nobody needs the step any more.
            self._output.losses.append(y[0].detach())
        else:
            self._hand_on(Direction.ACTIVATION, s, j, y, to, local)
        return start

    def _backward_input(self, compute: Compute) -> Any:
        """Runs B or BW, and hands the input's gradients on. Returns the mark of its start."""
        (kind, s, j), takes, to, local = compute
        gradients = self._arrived.pop((Direction.GRADIENT, s, j)) if takes else None
        self._streams.need((Direction.GRADIENT, s, j), gradients or ())
        start = self._mark()
        g = self._stages[s].backward_input(j, gradients, deferred=kind is Kind.B)
        if to is not None:
            self._hand_on(Direction.GRADIENT, s, j, g, to, local)
        return start

    def _hand_on(
        self, direction: Direction, s: int, j: int, tensors: Tensors, to: int, local: bool
    ) -> None:
        """Gives a result to a stage of this rank, or keeps it for its `Send`."""
        if local:
            self._arrived[direction, to, j] = tensors
            self._streams.produced((direction, to, j))
        else:
            self._leaving[direction, s, j] = tensors

    def _receive(self, awaited: Receive) -> None:
        start = self._mark()
        channel, s, j = awaited
        knew = self._transport.ragged
        self._arrived[channel.direction, s, j] = self._transport.take(channel, j)
        if self._transport.ragged and not knew:
            for stage in self._stages.values():
                stage.expect_ragged()
        self._intervals.append(Interval(WAIT, s, j, start, self._mark()))

    def _send(self, sent: Send) -> None:
        start = self._mark()
        channel, s, j = sent
        self._transport.put(channel, j, self._leaving.pop((channel.direction, s, j)))
        self._intervals.append(Interval(SEND, s, j, start, self._mark()))

    def _verdict(self, verdict: Verdict, is_validated: Callable[[Executor], bool]) -> bool:
        """Asks whether the step before is final. If not, undoes the work of this run."""
        start = self._mark()
        if not is_validated(self._executor):
            self._executor.clear()
            self._transport.rewind(verdict.begun)
            return False
        self._intervals.append(Interval(WAIT, self._program.stages[0], 0, start, self._mark()))
        return True
