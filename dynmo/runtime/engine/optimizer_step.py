"""The end of a step with a barrier: agreement, clipping, the optimizer.

gradients --merge tied, unscale--> norms --sum over all ranks--> finite? clip factor? -->
optimizers, or nothing

If a value is not finite, the step runs once more to find the first such value (`explained`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from dynmo.errors import DynmoError, RunError
from dynmo.kernels.torch_private import scale_all
from dynmo.runtime.engine.batch_check import StepBatch, StepSettings, tensors_of
from dynmo.runtime.engine.executor import StepOutput
from dynmo.runtime.engine.profiler import Profiler
from dynmo.runtime.engine.programs import Programs
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
    ) -> None:
        self._store, self.table, self._profiler = store, table, profiler
        self.scaler, self.clip_scope = scaler, clip_scope

    def agree(
        self, settings: StepSettings, step_output: StepOutput
    ) -> tuple[StepRecord, str | None, DynmoError | None]:
        """Has the ranks agree on a step. Returns the obstacle to it and the error, too."""
        self.prepare()
        entries = self.table.entries(step_output, settings.flag)
        table = self.table.shared(entries, "the step to end on every rank")
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
        return {i: each for i, each in sorted(self._store.optimizers.items()) if i not in frozen}

    def apply(self, squared_norms: Sequence[float], rates: Rates, max_norm: float) -> None:
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


class NotFiniteError(RunError):
    """The loss or a gradient of a step is not finite."""

    def __init__(self, step: int, what: str, advice: str) -> None:
        super().__init__(f"{what}. {advice}")
        self.step, self.what, self.advice = step, what, advice


# In the order in which a value can be the first. Then follow microbatch, layer and parameter.
_WEIGHT, _INPUTS, _TARGETS, _OUTPUT, _GRADIENT = range(5)
_Place = tuple[int, int, int, int]


def explained(
    error: NotFiniteError, store: LayerStore, programs: Programs, batch: StepBatch, scale: float
) -> RunError:
    """Returns the error with the place of the first value that is not finite.

    All ranks call it together. Weights and buffers stay as they are, and gradients are left.
    """
    found = [*_weights(store), *_data(store, batch)]
    executor = programs.executor()

    def look(backward: bool, layer: int, microbatch: int, tensors: Iterable[Tensor | None]) -> None:
        if not _is_finite(tensors):
            microbatch += store.world.replica * store.layout.microbatches
            place = (
                (_GRADIENT, microbatch, -layer, 0) if backward else (_OUTPUT, microbatch, layer, 0)
            )
            found.append(place)

    before = executor.copies()
    for stage in executor.stages.values():
        stage.look = look
    try:
        programs.train(batch, error.step, scale)
    finally:
        for stage in executor.stages.values():
            stage.look = None
        executor.restore(before)
    place = _first(store, found)
    return RunError(f"{error.what}. {_text(store, place)}. {error.advice}")


def _weights(store: LayerStore) -> Iterable[_Place]:
    for index, layer in store.layers.items():
        for at, parameter in enumerate(layer.module.parameters()):
            if not _is_finite([parameter]):
                yield _WEIGHT, 0, index, at


def _data(store: LayerStore, batch: StepBatch) -> Iterable[_Place]:
    first = store.world.replica * store.layout.microbatches
    for kind, given in ((_INPUTS, batch.inputs), (_TARGETS, batch.targets)):
        for microbatch, each in enumerate(() if given is None else given, first):
            if not _is_finite(tensors_of(each)):
                yield kind, microbatch, 0, 0


def _is_finite(tensors: Iterable[Tensor | None]) -> bool:
    return all(
        bool(x.isfinite().all())
        for x in tensors
        if x is not None and (x.is_floating_point() or x.is_complex())
    )


def _first(store: LayerStore, found: Iterable[_Place]) -> _Place | None:
    everyone = store.world.everyone
    table = torch.zeros(everyone.size, 5, dtype=torch.int64)
    first = min(found, default=None)
    if first is not None:
        table[everyone.rank] = torch.tensor((1, *first))
    everyone.sum(table, "the place of a value that is not finite")
    places = [tuple(row) for is_found, *row in table.tolist() if is_found]
    return min(places, default=None)


def _text(store: LayerStore, place: _Place | None) -> str:
    if place is None:
        return "All values were finite when the step was repeated"
    kind, microbatch, layer, at = place
    if kind in (_INPUTS, _TARGETS):
        return (
            f"The {'inputs' if kind == _INPUTS else 'targets'} of microbatch {microbatch} are not"
        )
    layer = abs(layer)
    named = f"layer {layer} ({store.model.names[layer]})"
    if kind == _WEIGHT:
        names = [name for name, _ in store.modules[layer].named_parameters()]
        return f"The weight {names[at]!r} of {named} was not finite before the step"
    if kind == _GRADIENT:
        return f"The first such value is a gradient, at {named} in microbatch {microbatch}"
    loss = " or of the loss" if layer == store.model.layers - 1 else ""
    return f"The first such value is an output of {named}{loss} in microbatch {microbatch}"
