"""A batch as users have it, cut into microbatches.

tensor [batch, ...]                          rows are cut evenly
{"input_ids": [batch, ...], "labels": ...}   each tensor likewise; the model says which is which
list of tensors, or of such dictionaries     the microbatches themselves, of any shapes
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from dynmo.errors import InputError
from dynmo.models.model import Model

Named: TypeAlias = Mapping[str, Tensor]
Batch: TypeAlias = Tensor | Named | Sequence[Tensor] | Sequence[Named]
Cut: TypeAlias = Tensor | list[Any] | None

_PAIR = "; for the (inputs, targets) of a DataLoader, call step(*batch)"


@dataclass(frozen=True)
class BatchNames:
    """The names that a batch may have.

    Attributes:
        inputs: In the order of the first layer's arguments.
        required: Number of leading inputs that must be there.
        targets: What the loss takes.
        gaps: Whether an input that is not required may be missing before one that is there.
        check: The model's own check of a batch.
    """

    inputs: tuple[str, ...]
    required: int
    targets: tuple[str, ...]
    gaps: bool = False
    check: Callable[[Named, str], None] | None = None

    @staticmethod
    def of(model: Model, first: nn.Module) -> BatchNames:
        """Returns the names that the model gives, or those of its first layer's arguments."""
        arguments = [
            each
            for each in inspect.signature(first.forward).parameters.values()
            if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
        ]
        optional = {at for at, each in enumerate(arguments) if each.default is not each.empty}
        names = model.inputs or tuple(each.name for each in arguments)
        if not names:
            raise InputError(
                f"the first layer ({type(first).__name__}) does not name its inputs; name them in "
                'dynmo.Sequential(layers, inputs=("input_ids", ...))'
            )
        required = len([at for at in range(len(names)) if at not in optional])
        return BatchNames(names, required, model.targets, model.gaps, model.check)

    def split(self, given: Named, where: str) -> tuple[tuple[Tensor, ...], Tensor | Named | None]:
        """Returns the inputs and the targets of one microbatch. Both may be empty.

        Raises:
            InputError: A name is unknown or missing, or the model refuses the batch.
        """
        names = {name for name, value in given.items() if cast(object, value) is not None}
        unknown = sorted(names - {*self.inputs, *self.targets})
        if unknown:
            raise InputError(f"{where} has {_list(unknown)}, which the model lacks; {self}")
        inputs = [name for name in self.inputs if name in names]
        last = self.inputs.index(inputs[-1]) + 1 if inputs else 0
        needed = self.inputs[: max(last, self.required)] if inputs else ()
        targets = [name for name in self.targets if name in names]
        must = needed[: self.required] if self.gaps else needed
        missing = [name for name in must if name not in names]
        missing += [name for name in self.targets if targets and name not in names]
        if missing:
            raise InputError(f"{where} lacks {_list(missing)}; {self}")
        taken = {name: _tensor(f"{name} of {where}", given[name]) for name in (*inputs, *targets)}
        if self.check is not None:
            self.check(taken, where)
        by_name = {name: taken[name] for name in targets}
        one = by_name.get(self.targets[0]) if len(self.targets) == 1 else by_name or None
        first = [taken[name] if name in taken else _gap(taken[inputs[0]]) for name in needed]
        return tuple(first), one

    def __str__(self) -> str:
        return f"its inputs are {_list(self.inputs)}, its targets {_list(self.targets)}"


def _gap(like: Tensor) -> Tensor:
    """Returns what stands for an input that is not there: as many rows, without elements."""
    return like.new_empty(len(like), 0)


class BatchCutter:
    """Cuts the batches of one pipeline.

    Args:
        first: The model's first layer, maybe on the meta device.
        dtype: Floating-point inputs become of this type.
    """

    def __init__(
        self, model: Model, first: nn.Module, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._model, self._first, self._dtype, self._device = model, first, dtype, device

    def cut(self, batch: object, targets: object, count: int) -> tuple[Cut, Cut]:
        """Returns inputs and targets of `count` microbatches, as the engine takes them.

        Raises:
            InputError: Something cannot be cut, or a name is unknown or missing.
        """
        inputs: Cut
        cut_targets: Cut
        if isinstance(batch, Mapping):
            names = BatchNames.of(self._model, self._first)
            inputs, cut_targets = _cut_named(*names.split(cast(Named, batch), "the batch"), count)
        elif isinstance(batch, list):
            inputs, cut_targets = self._cut_list(cast("list[object]", batch), count)
        else:
            inputs, cut_targets = None if batch is None else _cut("inputs", batch, count), None
        if targets is not None:
            if cut_targets is not None:
                raise InputError("the batch has its targets; leave out the second argument")
            cut_targets = self._targets(targets, count)
            _check_rows(inputs, cut_targets)
        return self._first_inputs(inputs, cut_targets), _map(
            cut_targets, lambda x: _plain(x, self._device)
        )

    def _cut_list(self, given: list[object], count: int) -> tuple[Cut, Cut]:
        tensors = all(isinstance(each, Tensor) for each in given)
        if not tensors and not all(isinstance(each, Mapping) for each in given):
            kinds = _list(sorted({type(each).__name__ for each in given}))
            raise InputError(
                f"inputs is a list of {kinds}; give one tensor or one dictionary of tensors "
                "for each microbatch"
            )
        if tensors:
            is_pair = len(given) == 2 and count != 2
            _check_number("the batch", given, count, _PAIR if is_pair else "")
            return [(_rows(f"microbatch {j}", each),) for j, each in enumerate(given)], None
        _check_number("the batch", given, count)
        names = BatchNames.of(self._model, self._first)
        pairs = [names.split(cast(Named, each), f"microbatch {j}") for j, each in enumerate(given)]
        inputs, targets = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        numbers = {len(each) for each in inputs}, {each is None for each in targets}
        for what, found in zip(("inputs", "targets"), numbers, strict=True):
            if len(found) > 1:
                raise InputError(
                    f"some microbatches have {what} that others lack; give all of them the same "
                    "names"
                )
        return inputs if inputs[0] else None, None if targets[0] is None else targets

    def _targets(self, given: object, count: int) -> Cut:
        if isinstance(given, list):
            several = cast("list[object]", given)
            _check_number("targets", several, count)
            return [_tensor(f"target {j}", each) for j, each in enumerate(several)]
        return _cut("targets", given, count)

    def _first_inputs(self, inputs: Cut, targets: Cut) -> Cut:
        """Returns the inputs on the device, in the precision of the first layer."""

        def ready(x: Tensor) -> Tensor:
            return _plain(x, self._device, self._dtype if x.is_floating_point() else None)

        inputs = _map(inputs, ready)
        if inputs is None or not self._model.takes_targets:
            return inputs
        if targets is None:
            raise InputError(
                "the model's first layer needs the targets too; pass targets on this rank"
            )
        if isinstance(inputs, Tensor) and isinstance(targets, Tensor):
            return self._model.first_inputs(inputs, targets)
        several = [x if isinstance(x, tuple) else (x,) for x in inputs]
        return [
            (self._model.first_inputs(x[0], y), *x[1:])
            for x, y in zip(several, targets, strict=True)
        ]


def _plain(x: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Returns the values in a tensor that a graph can save."""
    moved = x.to(device, dtype)
    return moved.clone() if moved.is_inference() else moved


def _check_rows(inputs: Cut, targets: Cut) -> None:
    """Refuses tensors of different numbers of rows. Lists hold what the loss makes of them."""
    if isinstance(inputs, Tensor) and isinstance(targets, Tensor):
        given, target_rows = (x.shape[0] * x.shape[1] for x in (inputs, targets))
        if given != target_rows:
            raise InputError(
                f"inputs has {given} rows and targets has {target_rows}; give each row its target, "
                "or lists of microbatches if rows share targets"
            )


def _map(cut: Cut, change: Any) -> Any:
    """Applies `change` to each tensor."""
    if cut is None or isinstance(cut, Tensor):
        return None if cut is None else change(cut)
    if isinstance(cut, Mapping):
        return {name: change(each) for name, each in cast(Named, cut).items()}
    return type(cut)(_map(each, change) for each in cut)


def _cut_named(
    inputs: tuple[Tensor, ...], targets: Tensor | Named | None, count: int
) -> tuple[Cut, Cut]:
    several = targets if isinstance(targets, Mapping) else {} if targets is None else {"": targets}
    sizes = [len(each) if each.dim() else 0 for each in (*inputs, *several.values())]
    if len(set(sizes)) > 1:
        raise InputError(
            f"the tensors of the batch have different numbers of rows: {', '.join(map(str, sizes))}"
        )
    rows = [_cut("the batch", each, count) for each in inputs]
    cuts = {name: _cut("the batch", each, count) for name, each in several.items()}
    return (
        [tuple(each[j] for each in rows) for j in range(count)] if rows else None,
        cuts.get("")
        if targets is None or isinstance(targets, Tensor)
        else [{name: each[j] for name, each in cuts.items()} for j in range(count)],
    )


def _cut(name: str, batch: object, count: int) -> Tensor:
    """Reshapes [batch, ...] to [microbatches, batch / microbatches, ...]."""
    if isinstance(batch, tuple):
        raise InputError(
            f"{name} is a tuple; give a dictionary of tensors by name, or a list of microbatches"
            f"{_PAIR if len(batch) == 2 else ''}"
        )
    tensor = _tensor(name, batch)
    if not tensor.dim() or len(tensor) % count or not len(tensor):
        raise InputError(
            f"{name} is a tensor of shape {list(tensor.shape)}; give a tensor whose first "
            f"dimension is a positive multiple of {count} microbatches"
        )
    return tensor.unflatten(0, (count, len(tensor) // count))


def _tensor(name: str, value: object) -> Tensor:
    if not isinstance(value, Tensor):
        raise InputError(f"{name} is a {type(value).__name__}; give a tensor")
    if value.layout != torch.strided or value.is_nested:
        raise InputError(
            f"{name} is nested; pad the rows, or give a list of microbatches"
            if value.is_nested
            else f"{name} is a tensor of {value.layout}; give a dense one, as to_dense() makes it"
        )
    return value


def _rows(name: str, value: object) -> Tensor:
    tensor = _tensor(name, value)
    if tensor.dim() and not len(tensor):
        raise InputError(f"{name} has no rows; give each microbatch at least one")
    return tensor


def _check_number(name: str, given: Sequence[object], count: int, more: str = "") -> None:
    if len(given) != count:
        raise InputError(
            f"{name} has {len(given)} microbatches, where {count} are expected (`microbatches` "
            f"of the pipeline, or of evaluate)"
            f"{more}"
        )


def _list(names: Sequence[str]) -> str:
    return ", ".join(names) if names else "none"
