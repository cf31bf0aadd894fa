"""The end of a step with a barrier: agreement, clipping, the optimizer.

gradients --merge tied, unscale--> norms --sum over all ranks--> finite? clip factor? -->
optimizers, or nothing

If a value is not finite, nothing is updated (`not_finite.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from torch import Tensor

from dynmo.errors import InputError
from dynmo.kernels.torch_private import scale_all
from dynmo.runtime.engine.batch_check import StepSettings
from dynmo.runtime.engine.executor import StepOutput
from dynmo.runtime.engine.not_finite import NotFinite, NotFiniteError, NotFiniteSteps
from dynmo.runtime.engine.profiler import Profiler
from dynmo.runtime.engine.step_reduction import StepRecord, StepReduction
from dynmo.runtime.optim.optimizer import LayerOptimizer, clip_factor, shares_in
from dynmo.runtime.optim.parameter_groups import Rates
from dynmo.runtime.optim.precision import LossScaler
from dynmo.runtime.state.layer_store import LayerStore

# Obstacles. NON_FINITE: no rank makes the step. CLIPPED: all make it with the clip factor.
NON_FINITE, CLIPPED = "non-finite", "clipped"


class OptimizerStep:
    def __init__(
        self,
        store: LayerStore,
        table: StepReduction,
        profiler: Profiler,
        scaler: LossScaler,
        clip_scope: Literal["global", "local"],
        stop_after: int,
    ) -> None:
        self._store, self.table, self._profiler = store, table, profiler
        self.scaler, self.clip_scope = scaler, clip_scope
        self.not_finite = NotFiniteSteps(stop_after)

    def agree(
        self, settings: StepSettings, step_output: StepOutput
    ) -> tuple[StepRecord, str | None, InputError | None]:
        """Has the ranks agree on a step. Returns the obstacle to it and the error, too."""
        self.prepare()
        entries = self.table.entries(step_output, settings.flag)
        table = self.table.shared(entries, "the step to end on every rank")
        result = self.table.read(settings.step, table, step_output, self.scaler.scale)
        failed = self.failed(result.loss, result.squared_norms, settings.max_norm)
        return result, failed, self.table.wrong_batch(settings.step, table)

    def update(self, result: StepRecord, failed: str | None, settings: StepSettings) -> StepRecord:
        """Updates the weights as all ranks agree, or skips it after an overflow."""
        if failed == NON_FINITE:
            result = self.overflowed(result)
        else:
            self.apply(result, settings.rates, settings.max_norm)
            self.observe_update()
        self.drop_gradients()
        self._store.tied.publish(self._store.frozen.layers)
        self.observe()
        return result

    def prepare(self) -> None:
        """Sums the gradients of tied weights and divides the loss scale out."""
        self._store.tied.merge()
        gradients: list[Tensor] = []
        for share in shares_in(self._store.optimizers.values()):
            if share.parameter.grad is not None:
                # Fused optimizers read memory as it lies. The tape of a custom module may leave a
                # gradient in another order.
                share.parameter.grad = share.parameter.grad.contiguous()
                gradients.append(share.parameter.grad)
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

    def is_overflow(self, result: StepRecord) -> bool:
        """Whether a step that is not finite may be finite under a lower loss scale."""
        return math.isfinite(result.loss) and self.scaler.skips

    def overflowed(self, result: StepRecord) -> StepRecord:
        """Lowers the loss scale. Returns the record of the step, which is skipped."""
        self.scaler.observe(finite=False)
        return self._skipped(result)

    def skip(self, result: StepRecord) -> StepRecord:
        """Counts a step that is not finite. Returns its record."""
        self.not_finite.skip()
        said = NotFinite(self.what(result), self.not_finite.in_a_row, self.not_finite.stop_after)
        return replace(self._skipped(result), not_finite=said)

    def _skipped(self, result: StepRecord) -> StepRecord:
        return replace(result, squared_norms=(0.0,) * self._store.model.layers, skipped=True)

    def what(self, result: StepRecord) -> str:
        """Returns what of a step is not finite."""
        scaler = self.scaler
        scaled = f" (loss scale {scaler.scale:g})" if scaler.scale != 1 or scaler.dynamic else ""
        return f"loss {result.loss}, gradient norm {result.norm}{scaled}"

    def error(self, result: StepRecord) -> NotFiniteError:
        """Returns the error that ends the run after too many steps that are not finite."""
        advice, scaler, many = "Lower the learning rate or check the data", self.scaler, ""
        if math.isfinite(result.loss) and scaler.scale != 1 and not scaler.dynamic:
            advice = 'Lower loss_scale, or take "dynamic"'
        if (count := self.not_finite.in_a_row + 1) > 1:
            many = f", as in {count} steps in a row (train.stop_after)"
        said = f"step {result.step}: {self.what(result)}{many}; nothing was updated"
        return NotFiniteError(result.step, said, advice)

    # -- changes to the layers ---------------------------------------------------------------------

    @property
    def trained(self) -> dict[int, LayerOptimizer]:
        """The layers that train, in one order on all peers, wherever they came from."""
        frozen = self._store.frozen.layers
        return {i: each for i, each in sorted(self._store.optimizers.items()) if i not in frozen}

    def apply(self, record: StepRecord, rates: Rates, max_norm: float) -> None:
        mark, squared_norms = self.table.clock.mark, record.squared_norms
        start = mark()
        norm = math.sqrt(math.fsum(squared_norms))
        local = self.clip_scope == "local"
        self._store.update.step(
            {
                optimizer: clip_factor(math.sqrt(squared_norms[index]) if local else norm, max_norm)
                for index, optimizer in self.trained.items()
            },
            rates,
        )
        self.share()
        record.step_output.updated = start, mark()

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
        self.drop_gradients()
        for layer in self._store.layers.values():
            layer.module.zero_grad()

    def observe_update(self) -> None:
        """Takes note that a step has updated the weights."""
        self.scaler.observe(finite=True)
        self.not_finite.in_a_row = 0

    def observe(self) -> None:
        self._profiler.observe(self._store.layers.values())
