"""Tries an optimizer on small parameters, to learn what it keeps and whether it can be split.

A layer's state moves with it, and each rank updates its layers alone. That gives the numbers of one
optimizer over the whole model only if the update of a parameter depends on nothing else. With
ZeRO-1 even parts of one parameter are updated apart.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dynmo.errors import ConfigError, DynmoError, one_line, place
from dynmo.kernels.seeds import generators_kept
from dynmo.kernels.torch_private import unset_fake_temporarily
from dynmo.runtime.comm.headers import DTYPES, as_bytes

Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
"""Takes groups of parameters, as torch's optimizers do."""
Given = tuple[Mapping[str, Any], Sequence[Tensor]]
"""Options of a group, and its parameters."""
NUMBER = ":number"
"""End of the name of a state that is a Python number."""

_STEPS = 3
# Attributes that torch itself sets on an optimizer.
_OF_TORCH = ("_numel_cache", "_step_count")


def name_of(make: Any) -> str:
    """Returns the name of a function behind its `functools.partial`."""
    while isinstance(make, partial):
        make = make.func
    return getattr(make, "__name__", type(make).__name__)


def make_optimizer(make: Make, groups: Sequence[Given]) -> torch.optim.Optimizer:
    """Makes an optimizer of these groups.

    Raises:
        ConfigError: The function raises, or gives something else.
    """
    where = f"optimizer: {name_of(make)}"
    given = [{**options, "params": list(parameters)} for options, parameters in groups]
    try:
        optimizer = make(given)
    except DynmoError:
        raise
    except Exception as error:  # anything that the user's code raises
        raise ConfigError(one_line(f"{where}: {error}{place(error)}")) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"{where} returned an object of {type(optimizer).__name__}; return an optimizer of "
            "the groups of parameters that it is given"
        )
    made = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
    if made != [[id(p) for p in parameters] for _, parameters in groups]:
        raise ConfigError(
            f"{where} makes groups of its own; let it keep the list of groups that it is given, "
            "and give groups to the pipeline"
        )
    return optimizer


@unset_fake_temporarily()
def find_state(
    make: Make, options: Mapping[str, Any], dims: int, device: torch.device
) -> dict[str, Any]:
    """Returns the state of a small parameter with these dimensions.

    Raises:
        ConfigError: The state can neither move nor be saved.
    """
    parameter = _draw(dims, device)
    state = _train(make, [(options, [parameter])]).state.get(parameter, {})
    found = {key: value for key, value in state.items() if value is not None}
    for key, value in found.items():
        if isinstance(value, Tensor):
            kind = None if value.dtype in DTYPES.values() else value.dtype
        else:
            kind = None if isinstance(value, int | float) else f"a {type(value).__name__}"
        if kind is not None:
            raise ConfigError(
                f"optimizer: {name_of(make)} keeps {key!r}, {kind}, which can neither move nor be "
                "saved; use one whose state is tensors and numbers"
            )
    return found


def is_cut(value: object, dims: int) -> bool:
    """Returns whether `find_state`'s value has an element for each of the parameter's."""
    return isinstance(value, Tensor) and value.shape == _shape(dims) != ()


def bytes_of(value: object, shape: Sequence[int], element: int) -> int:
    """Returns the bytes of `find_state`'s value for a parameter of another shape.

    A number counts as none.

    Args:
        element: Bytes of one of the parameter's elements.
    """
    if not isinstance(value, Tensor) or not value.dim():
        return 0
    sizes = list(value.shape)
    if len(sizes) == len(shape):
        pairs = zip(sizes, _shape(len(shape)), shape, strict=True)
        sizes = [real if size == small else size for size, small, real in pairs]
    size = element if value.dtype == torch.get_default_dtype() else value.itemsize
    return size * math.prod(sizes)


@unset_fake_temporarily()
def check_is_separable(
    make: Make, groups: Sequence[tuple[Mapping[str, Any], Sequence[int]]], device: torch.device
) -> None:
    """Checks that parameters with these dimensions are updated alike together and alone.

    Raises:
        ConfigError: They are not, or the optimizer has state that is not the parameters'.
    """
    name = name_of(make)
    together = [
        (options, [_draw(each, device, seed) for seed in range(2) for each in dims])
        for options, dims in groups
    ]
    pairs = [(options, p, p.clone()) for options, parameters in together for p in parameters]
    before = _own_state(make_optimizer(make, together))
    after = _own_state(_train(make, together))
    changed = next((key for key in after if before.get(key) != after[key]), None)
    if changed is not None:
        raise ConfigError(
            f"optimizer: {name} keeps {changed!r} outside of its parameters' state, so it would "
            "not move with a layer; use one that keeps all in state[parameter]"
        )
    for options, _, alone in pairs:
        _train(make, [(options, [alone])])
    if not all(_are_equal(alone, p) for _, p, alone in pairs):
        raise ConfigError(
            f"optimizer: {name} needs all parameters at once, but each rank has some; use one "
            "that updates each parameter by itself"
        )


@unset_fake_temporarily()
def is_elementwise(make: Make, options: Mapping[str, Any], device: torch.device) -> bool:
    """Returns whether parts of a parameter are updated like the whole, as ZeRO-1 asks."""
    whole = _draw(2, device)
    parts = [part.clone() for part in whole.reshape(-1).split(4)]
    try:
        for each in (whole, *parts):
            _train(make, [(options, [each])])
        state = find_state(make, options, 1, device).values()
    except ConfigError:
        return False
    return _are_equal(torch.cat(parts), whole.reshape(-1)) and all(
        is_cut(value, 1) or not (isinstance(value, Tensor) and value.dim()) for value in state
    )


def _shape(dims: int) -> tuple[int, ...]:
    return tuple(range(2, 2 + dims))


def _are_equal(left: Tensor, right: Tensor) -> bool:
    """Compares bits, since a large learning rate leads to NaN."""
    return torch.equal(as_bytes(left), as_bytes(right))


def _draw(dims: int, device: torch.device, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(_shape(dims), generator=generator).to(device)


@generators_kept(torch.device("cpu"))
def _train(make: Make, groups: Sequence[Given]) -> torch.optim.Optimizer:
    """Makes some steps.

    The gradient of an element follows from its value alone, and is not in proportion to it.
    """
    name = name_of(make)
    optimizer = make_optimizer(make, groups)
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"optimizer: {name} calls the model by a closure and needs all parameters at once; "
            "use one whose step() needs no closure"
        )
    for step in range(_STEPS):
        for _, parameters in groups:
            for p in parameters:
                p.grad = p * p.abs() * (step - 1.5)
        try:
            optimizer.step()
        except Exception as error:  # anything that the user's code raises
            raise ConfigError(
                one_line(f"optimizer: {name} cannot make a step: {error}{place(error)}")
            ) from error
    return optimizer


def _own_state(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Returns options of groups, and plain attributes, that a step may change, as texts."""
    groups = optimizer.param_groups
    names = {key for group in groups for key in group if key != "params"}
    own: dict[str, Any] = {key: [group.get(key) for group in groups] for key in sorted(names)}
    for key, value in vars(optimizer).items():
        is_plain = isinstance(value, int | float | Tensor) and not isinstance(value, bool)
        if is_plain and not key.startswith(_OF_TORCH):
            own[key] = value
    return {key: repr(value) for key, value in own.items()}
