"""Finds the first value of a step that is not finite, by running the step once more."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from dynmo.errors import RunError
from dynmo.runtime.engine.batch_check import StepBatch, tensors_of
from dynmo.runtime.engine.programs import Programs
from dynmo.runtime.state.layer_store import LayerStore


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
    own = min(found, default=None)
    if own is not None:
        table[everyone.rank] = torch.tensor((1, *own))
    everyone.sum(table, "the place of a value that is not finite")
    places = [tuple(row) for there, *row in table.tolist() if there]
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
