"""The typed records of a run's log (`runs/<name>/events.jsonl`).

The log has one JSON object a line. The runtime, the trainer and the reports share these records.
Floats are written so that they read back exactly (Python's repr does).
"""

from __future__ import annotations

import math
import time
import warnings
from dataclasses import dataclass, field
from typing import ClassVar


@dataclass(frozen=True)
class Event:
    """Base of all events.

    Attributes:
        step: The event happened before this step was over.
        time: Seconds since the epoch.
    """

    event: ClassVar[str] = ""
    kinds: ClassVar[dict[str, type[Event]]] = {}
    step: int
    time: float = field(default_factory=time.time, kw_only=True)

    def __init_subclass__(cls) -> None:
        if cls.event:
            Event.kinds[cls.event] = cls


@dataclass(frozen=True, repr=False)
class StepResult(Event):
    """One step: what `Pipeline.step` returns, and a line of the log.

    It is the same on every rank, but for times of this rank.

    Attributes:
        loss: Mean loss over all counted targets.
        tokens_per_s: Tokens per second that the loss counts as targets, so neither padding nor
            other labels of -100. All tokens if nothing counts targets. 0 if the size of a sample is
            unknown.
        idle_ratio: 1 - mean over the ranks of busy time / time from the first op to the last.
        imbalance: (max - min) / mean of the ranks' busy seconds.
        seconds: Wall time of the step on this rank.
        gradient_norm: Norm of all gradients before clipping. None if it is not finite.
        learning_rate: Learning rate of the step.
        layers: Number of layers on each stage.
        frozen: Number of frozen layers.
        model_flops_per_s: Floating-point operations of the model per second on all ranks, by
            arithmetic: 6 for each token and weight. Padding does not count, and all layers count
            alike whatever dynamic cases save. None if unknown.
        utilization: These over the FLOP/s that all ranks can do. None if unknown.
        memory: Peak bytes of each rank in forward and backward. On CUDA they are what torch's
            allocator gave out, and on CPU the resident memory of the process. Slices of one GPU
            have those of their process. 0 if unknown. Empty in older logs.
        gpu_seconds_returned: GPU-seconds so far of the ranks that the run did without.
        inherent_idle: Share of idle time that the schedule would have at equal stages, simulated.
            The rest of `idle_ratio` is due to imbalance, messages and other processes. None in
            older logs, and in a loop whose events nobody listens to.
        router_loss: What the routers of a model of transformers have added to the loss, with their
            weight. None if there are none.
        busy: Seconds that each rank (or slice) computed. Empty in older logs.
        skipped: Whether nothing was updated, because the loss or a gradient was not finite. The
            event `not_finite` says why. After an overflow under a dynamic loss scale it is
            `skipped`, and the scale falls.
        rolled_back: Whether the step was taken back once, with post-validation.
        stop: Whether a rank has asked to stop (`stop=True`).
        counted: Number of targets that the loss counts. Number of microbatches if nothing tells.
    """

    event: ClassVar[str] = "step"
    loss: float
    tokens_per_s: float
    idle_ratio: float
    imbalance: float
    seconds: float
    gradient_norm: float | None
    learning_rate: float
    layers: tuple[int, ...]
    frozen: int
    model_flops_per_s: float | None = None
    utilization: float | None = None
    memory: tuple[int, ...] = ()
    gpu_seconds_returned: float = 0.0
    inherent_idle: float | None = None
    router_loss: float | None = None
    busy: tuple[float, ...] = ()
    skipped: bool = False
    rolled_back: bool = False
    stop: bool = False
    counted: float = 0.0

    def __repr__(self) -> str:
        skipped = ", skipped=True" if self.skipped else ""
        norm = math.nan if self.gradient_norm is None else self.gradient_norm
        return (
            f"StepResult(step={self.step}, loss={self.loss:.6g}, gradient_norm={norm:.6g}, "
            f"idle_ratio={self.idle_ratio:.2f}{skipped})"
        )

    @property
    def norm(self) -> float:
        """The name of `gradient_norm` before version 0.2. NaN if it is not finite."""
        _warn_of("norm", "gradient_norm")
        return math.nan if self.gradient_norm is None else self.gradient_norm

    @property
    def rate(self) -> float:
        """The name of `learning_rate` before version 0.2."""
        _warn_of("rate", "learning_rate")
        return self.learning_rate

    @property
    def model_flops(self) -> float:
        """The operations of the step, before version 0.2."""
        _warn_of("model_flops", "model_flops_per_s, times StepResult.seconds")
        return (self.model_flops_per_s or 0.0) * self.seconds


def _warn_of(old: str, new: str) -> None:
    text = f"StepResult.{old} is StepResult.{new} now; the old name goes with the next version"
    warnings.warn(text, FutureWarning, stacklevel=3)


@dataclass(frozen=True)
class DataEvent(Event):
    """The samples of a step, as rank 0 has read them for its replica.

    Attributes:
        waited: Seconds that the step waited for them.
        tokens: Tokens of the microbatches, padding included.
        padding: Tokens that are padding.
        skipped: Number of broken samples that were left out so far.
    """

    event: ClassVar[str] = "data"
    waited: float
    tokens: int
    padding: int
    skipped: int


@dataclass(frozen=True)
class SkippedEvent(Event):
    """The gradients of a step overflowed, so nothing was updated.

    Attributes:
        loss_scale: Loss scale at which they overflowed.
        next_scale: Loss scale of the next step.
    """

    event: ClassVar[str] = "skipped"
    loss_scale: float
    next_scale: float

    @property
    def text(self) -> str:
        return f"skipped: gradients overflowed at a loss scale of {self.loss_scale:g}"


@dataclass(frozen=True)
class NotFiniteEvent(Event):
    """The loss or a gradient of a step was not finite, so the step was skipped.

    Weights, buffers, optimizer state and generators are as before the step.

    Attributes:
        what: Loss and gradient norm, and the first value that is not finite.
        kind: "weight", "inputs", "targets", "output" or "gradient". None if it is unknown.
        layer: Index of its layer. None if it is in none, or unknown.
        microbatch: Number of its microbatch, over all replicas. None if it is in none, or unknown.
        in_a_row: Number of such steps in a row, this one included.
        stop_after: Number of them in a row that ends the run (`train.stop_after`).
    """

    event: ClassVar[str] = "not_finite"
    what: str
    kind: str | None
    layer: int | None
    microbatch: int | None
    in_a_row: int
    stop_after: int

    @property
    def text(self) -> str:
        return f"skipped: {self.what} ({self.in_a_row} in a row; {self.stop_after} end the run)"


@dataclass(frozen=True)
class HeldOutEvent(Event):
    """What a run holds out, once it has read its data.

    Attributes:
        held_out: How many sequences or samples of which source, and how many of them an evaluation
            reads.
    """

    event: ClassVar[str] = "held_out"
    held_out: str


@dataclass(frozen=True)
class EvalEvent(Event):
    """An evaluation.

    If tokens exit early, the evaluation runs once more without exits. Older logs have the loss
    alone.

    Attributes:
        loss: Mean loss.
        tokens_per_s: Tokens per second. 0 if the size of a sample is unknown.
        dense_loss: Mean loss of the run without exits.
        dense_tokens_per_s: Tokens per second of the run without exits.
        held_out: The data, as of `HeldOutEvent`. None in older logs.
    """

    event: ClassVar[str] = "eval"
    loss: float
    tokens_per_s: float | None = None
    dense_loss: float | None = None
    dense_tokens_per_s: float | None = None
    held_out: str | None = None


@dataclass(frozen=True)
class FaultEvent(Event):
    """Something failed that the run can do without.

    Attributes:
        what: One line.
    """

    event: ClassVar[str] = "fault"
    what: str


@dataclass(frozen=True)
class RollbackEvent(Event):
    """With post-validation, step `step` was taken back.

    Attributes:
        what: "non-finite" (the step is not made) or "clipped" (it is made again, clipped).
        seconds: Time of rank 0's work that was thrown away.
    """

    event: ClassVar[str] = "rollback"
    what: str
    seconds: float


@dataclass(frozen=True)
class PostValidationEvent(Event):
    """Steps begin or cease to end without a barrier.

    The change holds from the step after this one on. If the model asks for a barrier, it holds from
    this step on.

    Attributes:
        on: Whether steps end without a barrier.
        reason: Why. Either too many steps were taken back, or the model asks for a barrier.
    """

    event: ClassVar[str] = "post_validation"
    on: bool
    reason: str


@dataclass(frozen=True)
class SavesEvent(Event):
    """A training that saves by itself begins.

    Attributes:
        saves: Where, when, and how many checkpoints stay.
    """

    event: ClassVar[str] = "saves"
    saves: str


@dataclass(frozen=True)
class CheckpointEvent(Event):
    """A checkpoint was saved.

    Attributes:
        path: Its path.
        bytes: Its size.
        seconds: How long saving took.
        waited: The part of them for which training stood still.
    """

    event: ClassVar[str] = "checkpoint"
    path: str
    bytes: int
    seconds: float
    waited: float | None = None


@dataclass(frozen=True)
class EndEvent(Event):
    """The run has ended.

    Attributes:
        loss: Last loss.
        weights_digest: See `LayerStates.digest`.
        seconds: Seconds of the whole run.
        reason: "done", "interrupted" by a signal, or "stopped" by `train.patience`.
        measure_seconds: Part of `seconds` to condense and gather the layers' costs, moves or not.
        decide_seconds: Part of `seconds` for the decisions of balancing.
        move_seconds: Part of `seconds` for moves.
        spared_forwards: F's of single frozen layers that a case has skipped, on all ranks.
        buffers_digest: See `LayerStates.buffers_digest`. None in older logs.
        gpu_seconds_returned: GPU seconds of the ranks that the run did without.
        load: Load average of rank 0's machine over the last minute. None in older logs.
        cores: Number of its cores. None in older logs.
        device: "cuda" or "cpu", which says whose memory a step has. None in older logs.
    """

    event: ClassVar[str] = "end"
    loss: float
    weights_digest: str
    seconds: float
    reason: str
    measure_seconds: float = 0.0
    decide_seconds: float = 0.0
    move_seconds: float = 0.0
    spared_forwards: int = 0
    buffers_digest: str | None = None
    gpu_seconds_returned: float = 0.0
    load: float | None = None
    cores: int | None = None
    device: str | None = None
