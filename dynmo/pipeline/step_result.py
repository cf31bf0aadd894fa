"""`StepResult`, the result of a step of `dynmo.Pipeline`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynmo.plan.partition import imbalance


@dataclass(frozen=True, repr=False)
class StepResult:
    """The result of one step. It is the same on every rank, but for times of this rank.

    Attributes:
        step: Number of the step.
        loss: Mean loss over all counted targets.
        norm: Norm of all gradients before clipping.
        rate: Learning rate of the step.
        seconds: Wall time of the step on this rank.
        busy: Seconds that each rank (or slice) computed.
        idle_ratio: 1 - mean over the ranks of busy time / time from the first op to the last.
        skipped: Whether gradients overflowed. Nothing was updated then, and the loss scale falls.
        rolled_back: Whether the step was taken back once, with post-validation.
        stop: Whether a rank has asked to stop (`stop=True`).
        layers: Number of layers on each stage.
        frozen: Number of frozen layers.
        counted: Number of targets that the loss counts. Number of microbatches if nothing tells.
        memory: Peak bytes of each rank in forward and backward. On CUDA they are what torch's
            allocator gave out, and on CPU the resident memory of the process. Slices of one GPU
            have those of their process. 0 if unknown.
        model_flops: Floating-point operations of the step by arithmetic: 6 a token and weight, and
            those of causal attention. Padding does not count, and all layers count alike whatever
            dynamic cases save. 0 if unknown.
        peak_flops: FLOP/s that all ranks can do. None if unknown.
        router_loss: What the routers of a model of transformers have added to the loss, with their
            weight. None if it adds none.
    """

    step: int
    loss: float
    norm: float
    rate: float
    seconds: float
    busy: Sequence[float]
    idle_ratio: float
    skipped: bool
    rolled_back: bool
    stop: bool
    layers: tuple[int, ...]
    frozen: int
    counted: float
    memory: tuple[int, ...]
    model_flops: float
    peak_flops: float | None
    router_loss: float | None = None

    def __repr__(self) -> str:
        skipped = ", skipped=True" if self.skipped else ""
        return (
            f"StepResult(step={self.step}, loss={self.loss:.6g}, norm={self.norm:.6g}, "
            f"idle_ratio={self.idle_ratio:.2f}{skipped})"
        )

    @property
    def utilization(self) -> float | None:
        """Model FLOPs over those that all ranks could have done. None if one is unknown."""
        if not self.model_flops or self.peak_flops is None:
            return None
        return self.model_flops / self.seconds / self.peak_flops

    @property
    def imbalance(self) -> float:
        """(max - min) / mean of the ranks' busy seconds."""
        return imbalance(self.busy)
