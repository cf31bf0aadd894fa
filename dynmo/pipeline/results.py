"""Results of steps, as users and the log get them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dynmo.events import Event, PostValidationEvent, RollbackEvent, SkippedEvent, StepResult
from dynmo.pipeline.options import PipelineOptions
from dynmo.plan.partition import imbalance
from dynmo.runtime.engine.engine import Engine
from dynmo.runtime.engine.step_reduction import StepRecord

# Bit of a step's flag: this rank wants to stop.
STOP = 1


class Evaluation(float):
    """The mean loss of an evaluation, a number, with what else was asked for.

    Attributes:
        outputs: The last layer's outputs for this replica's batch, [batch, ...]. None on ranks
            without the last stage, and unless they are asked for.
        metrics: The sums over all microbatches and replicas. Empty unless they are asked for.
    """

    outputs: Tensor | tuple[Tensor, ...] | None = None
    metrics: Mapping[str, float] = MappingProxyType({})

    @property
    def loss(self) -> float:
        return float(self)

    if not TYPE_CHECKING:

        def __iter__(self) -> Iterator[Any]:
            text = "evaluate returns a loss with outputs and metrics, and no tuple any more"
            warnings.warn(text, FutureWarning, stacklevel=2)
            return iter((self.loss, self.metrics or self.outputs))


@dataclass
class Started:
    """A step as it began.

    Attributes:
        rate: Learning rate.
        layers: Number of layers on each stage.
        frozen: Number of frozen layers.
        seconds: Seconds of the step, without the part of its end that fell into the next step.
    """

    rate: float
    layers: tuple[int, ...]
    frozen: int
    seconds: float = 0.0


def result_of(
    record: StepRecord,
    started: Started,
    engine: Engine,
    options: PipelineOptions,
    peak_flops: float | None,
    returned: float,
    is_heard: bool,
) -> StepResult:
    """Returns the result of a step.

    Args:
        peak_flops: FLOP/s that a rank can do. None if unknown.
        returned: GPU-seconds so far of the ranks that the run did without.
        is_heard: Whether somebody listens, so that idle time is worth a simulation.
    """
    model, samples, seconds = engine.model.options, options.micro_batch, started.seconds
    if engine.model.count is not None:
        tokens = record.counted
    elif model is not None and samples is not None:
        tokens = options.global_batch * model.sequence
    else:
        tokens = 0
    flops = record.work / seconds if record.work else None
    peak = None if peak_flops is None else peak_flops * engine.store.world.everyone.size
    return StepResult(
        record.step,
        record.loss,
        tokens_per_s=tokens / seconds,
        idle_ratio=record.idle_ratio,
        imbalance=imbalance(record.busy),
        seconds=seconds,
        gradient_norm=record.norm if math.isfinite(record.norm) else None,
        learning_rate=started.rate,
        layers=started.layers,
        frozen=started.frozen,
        model_flops_per_s=flops,
        utilization=None if flops is None or peak is None else flops / peak,
        memory=record.memory,
        gpu_seconds_returned=returned,
        inherent_idle=engine.schedule_keeper.inherent_idle(record.kinds) if is_heard else None,
        router_loss=record.router_loss,
        busy=record.busy,
        skipped=record.skipped,
        rolled_back=record.rollback is not None,
        stop=any(flag & STOP for flag in record.flags),
        counted=record.counted,
    )


def events_beside(record: StepRecord, next_scale: float) -> Iterator[Event]:
    """Yields what else a step tells: a rollback, a change of the barrier, an overflow."""
    step = record.step
    if record.rollback is not None:
        yield RollbackEvent(step, record.rollback.what, record.rollback.seconds)
    if record.switch is not None:
        yield PostValidationEvent(step, record.switch.on, record.switch.reason)
    if record.skipped:
        yield SkippedEvent(step, record.loss_scale, next_scale)
