"""Results of steps and evaluations, as users and the log get them.

A training step has 6 operations for each token and weight (Kaplan et al., 2020).
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch import Tensor

from dynmo.errors import RunError
from dynmo.events import (
    Event,
    NotFiniteEvent,
    PostValidationEvent,
    RollbackEvent,
    SkippedEvent,
    StepResult,
)
from dynmo.pipeline.options import PipelineOptions
from dynmo.plan.partition import Layout, imbalance
from dynmo.runtime.comm.agreement import share_texts
from dynmo.runtime.comm.rank_group import RankGroup
from dynmo.runtime.engine.engine import Engine
from dynmo.runtime.engine.not_finite import NotFinite
from dynmo.runtime.engine.step_reduction import StepRecord

Metrics: TypeAlias = Callable[[Any, Any], Mapping[str, Tensor | float]]
"""Takes outputs and targets of a microbatch, and returns sums by name."""

# Dense figures of the vendors' data sheets, in TFLOP/s: float32, and 16 bits with sums in float32.
# A name contains all words of its key. Longer keys come first.
_PEAKS: tuple[tuple[str, float, float], ...] = (
    ("H100 PCIe", 51.0, 756.0),
    ("H100 NVL", 60.0, 835.0),
    ("H100", 67.0, 989.0),
    ("H200 NVL", 60.0, 835.0),
    ("H200", 67.0, 989.0),
    ("B200", 75.0, 2250.0),
    ("A100", 19.5, 312.0),
    ("V100 PCIE", 14.0, 112.0),
    ("V100", 15.7, 125.0),
    ("L40S", 91.6, 362.0),
    ("L4", 30.3, 121.0),
    ("RTX 4090", 82.6, 165.2),
)

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


class MetricSums:
    """Adds up what a function returns for each microbatch."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics, self._values = metrics, dict[str, list[Tensor]]()

    def __call__(self, output: Any, targets: Any) -> None:
        with torch.no_grad():
            found = cast(object, self._metrics(output, targets))
            if not isinstance(found, Mapping):
                raise RunError(
                    f"metrics returned a {type(found).__name__}; it must return sums by name, "
                    'such as {"correct": 17}'
                )
            for name, value in cast(Mapping[str, Tensor | float], found).items():
                number = torch.as_tensor(value, dtype=torch.float64)
                self._values.setdefault(name, []).append(number)

    def over(self, world: RankGroup, *, shares: bool) -> dict[str, float]:
        """Returns the sums over all replicas, or of the first one unless `shares`."""
        own_values = {name: [value.item() for value in each] for name, each in self._values.items()}
        texts = share_texts(world, json.dumps(own_values), "the metrics")
        found = [cast("dict[str, list[float]]", json.loads(text)) for text in texts]
        first = [each for rank, each in enumerate(found) if not rank % world.replicas]
        counted = found if shares else first
        names = dict.fromkeys(name for each in counted for name in each)
        # Exact, so that any number of replicas has the same sum.
        return {
            name: math.fsum(value for each in counted for value in each.get(name, ()))
            for name in names
        }


@dataclass
class Started:
    """A step as it began.

    Attributes:
        rate: Learning rate.
        layout: Where the layers are.
        frozen: Number of frozen layers.
        seconds: Seconds of the step, without the part of its end that fell into the next step.
    """

    rate: float
    layout: Layout
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
        layers=started.layout.partition.counts,
        frozen=started.frozen,
        model_flops_per_s=flops,
        utilization=None if flops is None or peak is None else flops / peak,
        memory=record.memory,
        gpu_seconds_returned=returned,
        inherent_idle=engine.schedule_maker.inherent_idle(record.kinds) if is_heard else None,
        router_loss=record.router_loss,
        busy=record.busy,
        skipped=record.skipped,
        rolled_back=record.rollback is not None,
        stop=any(flag & STOP for flag in record.flags),
        counted=record.counted,
    )


def events_beside(record: StepRecord, next_scale: float) -> Iterator[Event]:
    """Yields what else a step tells: a rollback, a change of the barrier, why it was skipped."""
    step = record.step
    if record.rollback is not None:
        yield RollbackEvent(step, record.rollback.what, record.rollback.seconds)
    if record.switch is not None:
        yield PostValidationEvent(step, record.switch.on, record.switch.reason)
    if record.not_finite is not None:
        yield _not_finite_event(step, record.not_finite)
    elif record.skipped:
        yield SkippedEvent(step, record.loss_scale, next_scale)


def _not_finite_event(step: int, skipped: NotFinite) -> NotFiniteEvent:
    what, cause = skipped.what, skipped.cause
    row = skipped.in_a_row, skipped.stop_after
    if cause is None:
        return NotFiniteEvent(step, what, None, None, None, *row)
    return NotFiniteEvent(
        step, f"{what}. {cause.text}", cause.kind, cause.layer, cause.microbatch, *row
    )


# -- operations by arithmetic ---


def tokens_of(batch: Any) -> Tensor | float:
    """Counts the tokens of a replica's batch, without padding that a mask or positions tell.

    A tensor on a GPU is not waited for. 0 if the tokens are unknown.
    """
    if isinstance(batch, list):
        return sum(map(tokens_of, cast("list[Any]", batch)))
    if isinstance(batch, Mapping):
        named = cast("Mapping[str, Any]", batch)
        mask, positions = named.get("attention_mask"), named.get("position_ids")
        if isinstance(mask, Tensor) and mask.dim() == 2:
            return mask.sum().double()
        if isinstance(positions, Tensor) and positions.dim() == 2:
            # Positions begin anew with each packed sample of two or more tokens. Padding has 0.
            return ((positions > 0).sum() + (positions == 1).sum()).double()
        return tokens_of(named.get("input_ids"))
    if not isinstance(batch, Tensor) or batch.dim() < 2:
        return 0.0
    return float((batch.shape[:-1] if batch.is_floating_point() else batch.shape).numel())


def device_peak_flops(device: torch.device, precision: str) -> float | None:
    """Returns the FLOP/s of a GPU at most. None if they are unknown."""
    if device.type != "cuda":
        return None
    tensor_float = torch.get_float32_matmul_precision() != "highest"
    return peak_of(torch.cuda.get_device_name(device), precision, tensor_float)


def peak_of(name: str, precision: str, tensor_float: bool = False) -> float | None:
    """Returns the FLOP/s at most of a GPU with this name.

    Args:
        name: What the driver says. A part of a GPU (MIG) is unknown, and so are smaller variants.
        precision: "float32", "bfloat16" or "float16".
        tensor_float: Whether products of float32 are rounded to TF32. Their peak is unknown.
    """
    words = set(name.replace("-", " ").split())
    if words & {"MIG", "D", "Laptop"} or (precision == "float32" and tensor_float):
        return None
    for key, single, half in _PEAKS:
        if words.issuperset(key.split()):
            if precision == "bfloat16" and key.startswith("V100"):
                return None  # it has no units for that
            return (single if precision == "float32" else half) * 1e12
    return None
