"""Steps whose loss or gradient is not finite: they are skipped and counted, and the cause is named.

    agreed: not finite --> buffers as before --> cause: a weight? data? --> else run again and look
                                                                         --> skipped, or the error

A skipped step leaves no trace: weights, optimizer state, buffers and generators are as before. The
steps behind it draw as if it had never been, so the weights are those of a run without its batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dynmo.errors import RunError
from dynmo.runtime.engine.batch_check import StepBatch, tensors_of
from dynmo.runtime.engine.programs import Programs
from dynmo.runtime.state.layer_store import LayerStore


class NotFiniteError(RunError):
    """As many steps in a row as allowed were not finite.

    Attributes:
        step: The last of them, which is not done.
    """

    def __init__(self, step: int, what: str, advice: str) -> None:
        super().__init__(f"{what}. {advice}")
        self.step, self.what, self.advice = step, what, advice

    def caused_by(self, cause: Cause) -> NotFiniteError:
        return NotFiniteError(self.step, f"{self.what}. {cause.text}", self.advice)


class NotFiniteSteps:
    """Counts the steps that were skipped because they were not finite.

    An overflow under a dynamic loss scale is none of them.

    Args:
        stop_after: Number of such steps in a row that ends the training.

    Attributes:
        count: All of them so far.
        in_a_row: Those since the last step that updated the weights.
    """

    def __init__(self, stop_after: int) -> None:
        self.stop_after = stop_after
        self.count = self.in_a_row = 0

    @property
    def next_ends(self) -> bool:
        return self.in_a_row + 1 >= self.stop_after

    def skip(self) -> None:
        self.count += 1
        self.in_a_row += 1

    def state(self) -> dict[str, int]:
        return {"count": self.count, "in_a_row": self.in_a_row}

    def load(self, state: Mapping[str, int]) -> None:
        self.count, self.in_a_row = state["count"], state["in_a_row"]


# In the order in which a value can be the first. Then follow microbatch, layer and parameter.
KINDS = ("weight", "inputs", "targets", "output", "gradient")
_WEIGHT, _INPUTS, _TARGETS, _OUTPUT, _GRADIENT = range(5)
_Place = tuple[int, int, int, int]


@dataclass(frozen=True)
class Cause:
    """The first value of a step that is not finite.

    Attributes:
        kind: One of `KINDS`. None if all values were finite when the step ran again.
        layer: Index of the layer. None for inputs and targets.
        microbatch: Number of the microbatch over all replicas. None for a weight.
        text: A sentence.
    """

    kind: str | None
    layer: int | None
    microbatch: int | None
    text: str


@dataclass(frozen=True)
class NotFinite:
    """Why a step was skipped whose loss or gradient is not finite.

    Attributes:
        what: Loss and norm, as text.
        in_a_row: Number of such steps in a row, this one included.
        stop_after: Number of them that would have ended the training.
        cause: The first such value. None if it was not looked for, because a rank has failed.
    """

    what: str
    in_a_row: int
    stop_after: int
    cause: Cause | None = None


def find_cause(
    store: LayerStore, programs: Programs, batch: StepBatch, draw: int, scale: float
) -> Cause:
    """Finds the first value of a step that is not finite. Runs the step again if it must.

    All ranks call it together. Weights and buffers stay as they are, and gradients are left.

    Args:
        draw: The number that seeded what layers drew in the step.
    """
    place = _first(store, [*_weights(store), *_data(store, batch)])
    if place is None:
        place = _first(store, _places_in_run(store, programs, batch, draw, scale))
    return _cause(store, place)


def _places_in_run(
    store: LayerStore, programs: Programs, batch: StepBatch, draw: int, scale: float
) -> list[_Place]:
    """Runs a step and looks at each output and gradient."""
    found, summed = list[_Place](), set[int]()
    executor = programs.executor()

    def look(what: str, layer: int, microbatch: int, tensors: Iterable[Tensor | None]) -> None:
        # Later microbatches are added to a sum, which then stays as it is.
        if layer in summed and what == "sum":
            return
        if not _is_finite(tensors):
            microbatch += store.world.replica * store.layout.microbatches
            is_output = what == "output"
            place = _OUTPUT if is_output else _GRADIENT, microbatch, layer if is_output else -layer
            found.append((*place, 0))
            if what == "sum":
                summed.add(layer)

    before = executor.copies()
    for stage in executor.stages.values():
        stage.look = look
    try:
        programs.train(batch, draw, scale, measures=False)
    finally:
        for stage in executor.stages.values():
            stage.look = None
        executor.restore(before)
    return found


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


def _cause(store: LayerStore, place: _Place | None) -> Cause:
    if place is None:
        return Cause(None, None, None, "All values were finite when the step was repeated")
    number, microbatch, layer, at = place
    kind = KINDS[number]
    if number in (_INPUTS, _TARGETS):
        return Cause(
            kind, None, microbatch, f"The {kind} of microbatch {microbatch} are not finite"
        )
    layer = abs(layer)
    named = f"layer {layer} ({store.model.names[layer]})"
    if number == _WEIGHT:
        names = [name for name, _ in store.modules[layer].named_parameters()]
        text = f"The weight {names[at]!r} of {named} was not finite before the step"
        return Cause(kind, layer, None, text)
    if number == _GRADIENT:
        text = f"The first such value is a gradient, at {named} in microbatch {microbatch}"
        return Cause(kind, layer, microbatch, text)
    loss = " or of the loss" if layer == store.model.layers - 1 else ""
    text = f"The first such value is an output of {named}{loss} in microbatch {microbatch}"
    return Cause(kind, layer, microbatch, text)
