"""for op in program: interpret it; nothing else. No rank arithmetic, no names of schedules."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dynmo.runtime.comm.channels import Transport
from dynmo.runtime.comm.clock import Clock
from dynmo.runtime.engine.stage_streams import Key, StageStreams
from dynmo.runtime.layer.buffers import BufferSet
from dynmo.runtime.layer.split_backward import Tensors
from dynmo.runtime.layer.stage import Stage
from dynmo.runtime.layer.weight_grad_queue import WeightGradQueue
from dynmo.schedule.lowering import Compute, Direction, Program, Receive, Verdict
from dynmo.schedule.op import Kind

# What a rank spends time on, beyond the kinds of op: waiting for a message, handing one over.
WAIT, SEND = "wait", "send"


class Interval(NamedTuple):
    """One interval of a rank's step, as marks of its clock. kind: F, B, W, BW, wait or send."""

    kind: str
    stage: int
    microbatch: int
    start: Any
    end: Any


@dataclass
class StepOutput:
    """What one step left: the losses of the microbatches (last stage), and where the time went."""

    losses: list[Tensor] = field(default_factory=list[Tensor])
    intervals: list[Interval] = field(default_factory=list[Interval])


class Executor:
    """Runs one rank's program over its stages and channels.

    patience: seconds for which a rank waits for a message before it runs pieces of W's that are further on in the program
    (`weight_grad_queue.py`); None where it never does. In a pipeline that keeps time every wait is as short as a message takes, and a piece
    begun there only holds up who waits for the next op.
    """

    def __init__(
        self,
        program: Program,
        stages: Mapping[int, Stage],
        last_stage: int,
        transport: Transport,
        clock: Clock,
        streams: StageStreams,
        timeout: float | None = None,
    ) -> None:
        self._program, self._stages, self._last = program, stages, last_stage
        self._transport, self._clock, self._streams, self._timeout = transport, clock, streams, timeout
        self._buffers = BufferSet(layer.module for stage in stages.values() for layer in stage.layers)

    def run(
        self,
        step: int,
        inputs: Tensor | None,
        targets: Tensor | None,
        training: bool = True,
        is_validated: Callable[[], bool] | None = None,
    ) -> StepOutput:
        """inputs: [microbatches, ...] where the first stage is; targets: [microbatches, ...] where the last one is.

        stands: asked at the program's Verdict whether the step before does. If not, on all ranks, the program begins again.
        """
        # A garbage collection in the middle of a step would hold up every rank downstream; between steps it holds up none.
        collecting = gc.isenabled()
        gc.disable()
        try:
            self._transport.open()
            before = None if is_validated is None else self._buffers.copies()
            self._streams.fork()
            step_output = self._run(step, inputs, targets, training, is_validated)
            if step_output is None:
                assert before is not None
                self._buffers.restore(before)
                step_output = self._run(step, inputs, targets, training, None)
                assert step_output is not None
            self._streams.join()
            self._transport.flush()
            return step_output
        finally:
            if collecting:
                gc.enable()

    def _run(
        self, step: int, inputs: Tensor | None, targets: Tensor | None, training: bool, is_validated: Callable[[], bool] | None
    ) -> StepOutput | None:
        """None: it must begin again, and all but the buffers is as it was at its start."""
        step_output = StepOutput()
        mark, intervals, streams = self._clock.mark, step_output.intervals, self._streams
        queue = WeightGradQueue(self._program.instructions, self._stages)
        # Tensors on their way to an op or to a channel, by (direction, stage that needs or made them, microbatch).
        arrived: dict[Key, Tensors] = {}
        leaving: dict[Key, Tensors] = {}
        for instruction in self._program.instructions:
            if isinstance(instruction, Compute):
                kind, s, j = instruction.op
                stage = self._stages[s]
                with streams.of(s):
                    if kind is Kind.F:
                        x = arrived.pop((Direction.ACTIVATION, s, j)) if s else (_at(inputs, j),)
                        streams.need((Direction.ACTIVATION, s, j), x)
                        start = mark()
                        y = stage.forward(j, x, step, _at(targets, j) if s == self._last else None, training)
                        if s == self._last:
                            step_output.losses.append(y[0].detach())  # or it would keep its graph until nobody asks for the step any more
                        elif s + 1 in self._stages:
                            arrived[Direction.ACTIVATION, s + 1, j] = y
                            streams.produced((Direction.ACTIVATION, s + 1, j))
                        else:
                            leaving[Direction.ACTIVATION, s, j] = y
                    elif kind is Kind.W:
                        start = mark()
                        queue.run_rest(instruction.op)
                    else:
                        gradients = arrived.pop((Direction.GRADIENT, s, j)) if s != self._last else None
                        streams.need((Direction.GRADIENT, s, j), gradients or ())
                        start = mark()
                        g = stage.backward_input(j, gradients, deferred=kind is Kind.B)
                        if s > self._program.first_trainable and s - 1 in self._stages:
                            arrived[Direction.GRADIENT, s - 1, j] = g
                            streams.produced((Direction.GRADIENT, s - 1, j))
                        elif s > self._program.first_trainable:
                            leaving[Direction.GRADIENT, s, j] = g
                    queue.after(instruction.op)
                    intervals.append(Interval(kind, s, j, start, mark()))
                x = y = g = gradients = ()  # or they would live on through the next op
                continue
            start = mark()
            if isinstance(instruction, Verdict):
                if is_validated is None:
                    continue
                if not is_validated():
                    self.clear()
                    self._transport.rewind(instruction.begun)
                    return None
                intervals.append(Interval(WAIT, self._program.stages[0], 0, start, mark()))
                continue
            channel, s, j = instruction
            if isinstance(instruction, Receive):
                if self._timeout is not None:
                    start = self._meanwhile(instruction, self._timeout, queue, start, intervals)
                arrived[channel.direction, s, j] = self._transport.take(channel, j)
                intervals.append(Interval(WAIT, s, j, start, mark()))
            else:
                self._transport.put(channel, j, leaving.pop((channel.direction, s, j)))
                intervals.append(Interval(SEND, s, j, start, mark()))
        return step_output

    def _meanwhile(self, awaited: Receive, timeout: float, queue: WeightGradQueue, start: Any, intervals: list[Interval]) -> Any:
        """Runs pieces of W, if there are any, until the message is there. start, and what it returns: since when the rank waits."""
        mark, (channel, s, j) = self._clock.mark, awaited
        while queue.any and not self._transport.arrived(channel, j, timeout):
            began, op, timeout = mark(), queue.run_one(), 0.0
            if op is not None:
                intervals.append(Interval(WAIT, s, j, start, began))
                start = mark()
                intervals.append(Interval(op.kind, op.stage, op.microbatch, began, start))
        return start

    def scale_loss(self, scale: float) -> None:
        """From the next run on, gradients are those of `scale` times the loss."""
        for stage in self._stages.values():
            stage.scale_loss(scale)

    def close(self) -> None:
        self._transport.close()

    def clear(self) -> None:
        for stage in self._stages.values():
            stage.clear()


def _at(batch: Tensor | None, microbatch: int) -> Tensor:
    assert batch is not None, "a first stage needs inputs, a last stage targets"
    return batch[microbatch]


def mean_loss(losses: list[Tensor]) -> float:
    """The step's loss: the mean over the microbatches, added in their order; 0 on a rank that has none."""
    return float(torch.stack(losses).double().mean()) if losses else 0.0
