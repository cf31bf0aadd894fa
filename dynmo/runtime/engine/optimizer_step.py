"""The end of a step with a barrier: what the ranks must agree on, clipping, the optimizer.

gradients --merge tied, unscale--> norms --sum over all ranks--> finite? clip factor? -->
optimizers, or nothing
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from dynmo.errors import RunError
from dynmo.kernels.torch_private import scale_all
from dynmo.runtime.engine.executor import StepOutput
from dynmo.runtime.engine.norm_ring import CLIPPED, NON_FINITE
from dynmo.runtime.engine.profiler import Profiler
from dynmo.runtime.engine.step_reduction import StepReduction, StepResult
from dynmo.runtime.optim.loss_scale import LossScaler
from dynmo.runtime.optim.optimizer import LayerOptimizer, clip_factor
from dynmo.runtime.state.layer_store import LayerStore


class OptimizerStep:
    """scaler: of the loss. clip_scope: by which norm a layer is clipped, that of all or its own."""

    def __init__(
        self,
        layer_store: LayerStore,
        table: StepReduction,
        profiler: Profiler,
        scaler: LossScaler,
        clip_scope: Literal["global", "local"],
    ) -> None:
        self._layer_store, self.table, self._profiler = layer_store, table, profiler
        self.scaler, self.clip_scope = scaler, clip_scope

    def update(
        self, step: int, step_output: StepOutput, lr: float, max_norm: float, flag: int
    ) -> tuple[StepResult, str | None]:
        """The step's result, and what kept it from being made as its gradients were. Raises
        RunError where that ends the run."""
        self.prepare()
        table = self.table.once(self.table.own(step_output, flag))
        everyone = self._layer_store.world.everyone
        result = self.table.read(
            step,
            everyone.sum(table, "the step to end on every rank"),
            step_output,
            self.scaler.scale,
        )
        failed = self.failed(result.loss, result.squared_norms, max_norm)
        error = self.error(result) if failed == NON_FINITE else None
        if error is not None:
            self.discard()
            raise error
        self.scaler.observe(failed != NON_FINITE)
        if failed == NON_FINITE:
            result = self.skipped(result)
        else:
            self.apply(result.squared_norms, lr, max_norm)
        self.drop_gradients()
        self._layer_store.tied.publish(self._layer_store.frozen.layers)
        self.observe()
        return result, failed

    def prepare(self) -> None:
        """Before anyone looks at the gradients: those of tied weights are summed, and the loss
        scale is divided out."""
        self._layer_store.tied.merge()
        for layer in self._layer_store.layers.values():
            for parameter in layer.module.parameters():
                # Fused optimizers read memory as it lies; the tape of a module of one's own may
                # leave a gradient in another order.
                if parameter.grad is not None and not parameter.grad.is_contiguous():
                    parameter.grad = parameter.grad.contiguous()
        self._unscale()

    def _unscale(self) -> None:
        """Divides the loss scale out of the gradients: a power of two, so no bits change."""
        if self.scaler.scale != 1:
            gradients = [
                p.grad
                for layer in self._layer_store.layers.values()
                for p in layer.module.parameters()
                if p.grad is not None
            ]
            if gradients:
                scale_all(gradients, 1 / self.scaler.scale)

    # -- what a step is up against -----------------------------------------------------------------

    def failed(self, loss: float, squared_norms: Sequence[float], max_norm: float) -> str | None:
        """What keeps a step from being made as its gradients are; of a prefix, where the entries of
        later ranks are still 0, so far."""
        if not all(map(math.isfinite, (loss, *squared_norms))):
            return NON_FINITE
        clips = (
            self.clip_scope == "global"
            and clip_factor(math.sqrt(math.fsum(squared_norms)), max_norm) != 1.0
        )
        return CLIPPED if clips else None

    def error(self, result: StepResult) -> RunError | None:
        """Of a step whose loss or norm is not finite: what ends the run; None where the step is
        skipped, for gradients overflowed under a loss scale that may fall. The one place where that
        is decided, alike on every rank."""
        scaler, finite = self.scaler, math.isfinite(result.loss)
        if finite and scaler.skips:
            return None
        scaled = f" (loss scale {scaler.scale:g})" if scaler.scale != 1 or scaler.dynamic else ""
        what = "Lower train.lr or check the data"
        if finite and scaled and not scaler.dynamic:
            what = 'Lower train.loss_scale, or take "dynamic"'
        return RunError(
            f"step {result.step}: loss {result.loss}, gradient norm {result.norm}{scaled}; nothing was updated. {what}"
        )

    def skipped(self, result: StepResult) -> StepResult:
        return replace(result, squared_norms=(0.0,) * self._layer_store.model.layers, skipped=True)

    # -- what is done to the layers ----------------------------------------------------------------

    def apply(self, squared_norms: Sequence[float], lr: float, max_norm: float) -> None:
        """Steps the layers, clipped. squared_norms: of all layers, or of its own where each is
        clipped by its own."""
        norm = math.sqrt(math.fsum(squared_norms))
        own = self.clip_scope == "local"
        self._each(
            lambda index, optimizer: optimizer.step(
                lr, clip_factor(math.sqrt(squared_norms[index]) if own else norm, max_norm)
            )
        )

    def take_back(self, undo: Callable[[LayerOptimizer], None]) -> None:
        """After `apply`: undoes what it did to each layer."""
        self._each(lambda _, optimizer: undo(optimizer))

    def _each(self, act: Callable[[int, LayerOptimizer], None]) -> None:
        """Of the layers that train, with ZeRO-1 until all replicas have the new parameters."""
        frozen, replicas = self._layer_store.frozen.layers, self._layer_store.replicas
        for index, optimizer in sorted(
            self._layer_store.optimizers.items()
        ):  # peers in one order, wherever their layers came from
            if index not in frozen:
                act(index, optimizer)
                replicas.send_parameters(index)
        replicas.await_parameters()

    def drop_gradients(self) -> None:
        for optimizer in self._layer_store.optimizers.values():
            optimizer.drop_gradients()

    def discard(self) -> None:
        """Instead of `update`: drops the gradients and keeps the measurements."""
        for layer in self._layer_store.layers.values():
            layer.module.zero_grad()
        self.observe()

    def observe(self) -> None:
        """The profiler takes the layers' marks of the step."""
        self._profiler.observe(self._layer_store.layers.values())
