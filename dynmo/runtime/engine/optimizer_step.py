"""The end of a step with a barrier: agreement, clipping, the optimizer.

gradients --merge tied, unscale--> norms --sum over all ranks--> finite? clip factor? -->
optimizers, or nothing
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from torch import Tensor

from dynmo.errors import DynmoError
from dynmo.kernels.torch_private import scale_all
from dynmo.runtime.engine.batch_check import StepSettings
from dynmo.runtime.engine.executor import StepOutput
from dynmo.runtime.engine.norm_ring import CLIPPED, NON_FINITE
from dynmo.runtime.engine.not_finite import NotFiniteError
from dynmo.runtime.engine.profiler import Profiler
from dynmo.runtime.engine.step_reduction import StepRecord, StepReduction
from dynmo.runtime.optim.loss_scale import LossScaler
from dynmo.runtime.optim.optimizer import LayerOptimizer, clip_factor, pieces_of
from dynmo.runtime.optim.parameter_groups import Rates
from dynmo.runtime.state.layer_store import LayerStore


class OptimizerStep:
    def __init__(
        self,
        store: LayerStore,
        table: StepReduction,
        profiler: Profiler,
        scaler: LossScaler,
        clip_scope: Literal["global", "local"],
    ) -> None:
        self._store, self.table, self._profiler = store, table, profiler
        self.scaler, self.clip_scope = scaler, clip_scope

    def agree(
        self, settings: StepSettings, step_output: StepOutput
    ) -> tuple[StepRecord, str | None, DynmoError | None]:
        """Has the ranks agree on a step. Returns the obstacle to it and the error, too."""
        self.prepare()
        own = self.table.own(step_output, settings.flag)
        table = self.table.shared(own, "the step to end on every rank")
        result = self.table.read(settings.step, table, step_output, self.scaler.scale)
        failed = self.failed(result.loss, result.squared_norms, settings.max_norm)
        error = self.table.wrong_batch(settings.step, table)
        if error is None and failed == NON_FINITE:
            error = self.error(result)
        return result, failed, error

    def update(self, result: StepRecord, failed: str | None, settings: StepSettings) -> StepRecord:
        """Updates the weights as all ranks agree, or skips it."""
        self.scaler.observe(failed != NON_FINITE)
        if failed == NON_FINITE:
            result = self.skipped(result)
        else:
            self.apply(result.squared_norms, settings.rates, settings.max_norm)
        self.drop_gradients()
        self._store.tied.publish(self._store.frozen.layers)
        self.observe()
        return result

    def prepare(self) -> None:
        """Sums the gradients of tied weights and divides the loss scale out."""
        self._store.tied.merge()
        gradients: list[Tensor] = []
        for piece in pieces_of(self._store.optimizers.values()):
            if piece.parameter.grad is not None:
                # Fused optimizers read memory as it lies. The tape of a custom module may leave a
                # gradient in another order.
                piece.parameter.grad = piece.parameter.grad.contiguous()
                gradients.append(piece.parameter.grad)
        if gradients and self.scaler.scale != 1:  # a power of two, so no bits change
            scale_all(gradients, 1 / self.scaler.scale)

    # -- obstacles to a step -----------------------------------------------------------------------

    def failed(self, loss: float, squared_norms: Sequence[float], max_norm: float) -> str | None:
        """Returns the obstacle to a step with unclipped gradients, or None.

        Also valid for a prefix, in which the entries of later ranks are still 0.
        """
        if not all(map(math.isfinite, (loss, *squared_norms))):
            return NON_FINITE
        clips = (
            self.clip_scope == "global"
            and clip_factor(math.sqrt(math.fsum(squared_norms)), max_norm) != 1.0
        )
        return CLIPPED if clips else None

    def error(self, result: StepRecord) -> NotFiniteError | None:
        """Returns the error that ends the run after a loss or norm that is not finite.

        None if the step is skipped: gradients overflowed under a loss scale that may fall.
        """
        scaler, finite = self.scaler, math.isfinite(result.loss)
        if finite and scaler.skips:
            return None
        scaled = f" (loss scale {scaler.scale:g})" if scaler.scale != 1 or scaler.dynamic else ""
        what = "Lower the learning rate or check the data"
        if finite and scaled and not scaler.dynamic:
            what = 'Lower loss_scale, or take "dynamic"'
        said = f"loss {result.loss}, gradient norm {result.norm}{scaled}; nothing was updated"
        return NotFiniteError(result.step, f"step {result.step}: {said}", what)

    def skipped(self, result: StepRecord) -> StepRecord:
        return replace(result, squared_norms=(0.0,) * self._store.model.layers, skipped=True)

    # -- changes to the layers ---------------------------------------------------------------------

    @property
    def trained(self) -> dict[int, LayerOptimizer]:
        """The layers that train, in one order on all peers, wherever they came from."""
        frozen = self._store.frozen.layers
        return {i: own for i, own in sorted(self._store.optimizers.items()) if i not in frozen}

    def apply(self, squared_norms: Sequence[float], rates: Rates, max_norm: float) -> None:
        norm = math.sqrt(math.fsum(squared_norms))
        own = self.clip_scope == "local"
        self._store.update.step(
            {
                optimizer: clip_factor(math.sqrt(squared_norms[index]) if own else norm, max_norm)
                for index, optimizer in self.trained.items()
            },
            rates,
        )
        self.share()

    def share(self) -> None:
        """Exchanges the shares of updated parameters with the other replicas, with ZeRO-1."""
        for index in self.trained:
            self._store.replicas.send_parameters(index)
        self._store.replicas.finish("the parameters of the step")

    def drop_gradients(self) -> None:
        for optimizer in self._store.optimizers.values():
            optimizer.drop_gradients()

    def discard(self) -> None:
        """Drops the gradients instead of a step, and keeps the measurements."""
        self.drop_all_gradients()
        self.observe()

    def drop_all_gradients(self) -> None:
        for layer in self._store.layers.values():
            layer.module.zero_grad()

    def observe(self) -> None:
        self._profiler.observe(self._store.layers.values())
