"""The model that options name: one of dynmo's kinds, or a user's own function."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import wraps
from typing import Any, cast

import torch
from torch import Tensor, nn

from dynmo.errors import ConfigError
from dynmo.kernels.seeds import Purpose, generators_kept, mix
from dynmo.kernels.torch_private import tree_leaves
from dynmo.models import emulated, gpt
from dynmo.models.copies import as_fakes, copied, without_memory
from dynmo.models.loss import Loss, next_token_loss
from dynmo.models.model import Model, defined_in, from_factories
from dynmo.models.options import ModelOptions
from dynmo.models.sequential import Sequential
from dynmo.options import find_own

# Functions that make a model of options, seed and options of cases, or where they are.
KINDS: dict[str, Callable[[ModelOptions, int, Iterable[Any]], Model] | str] = {
    "gpt": gpt.make,
    "moe": "dynmo.cases.experts.layers:make",
    "emulated": emulated.make,
}


def load_model(
    options: ModelOptions, seed: int = 0, cases: Iterable[Any] = (), loss: Loss | None = None
) -> Model:
    """Loads one of dynmo's own models, or makes one of a user's function.

    With `torch.device("meta")` a model of the kind "hf" needs no weights. It can then be planned.

    Args:
        options: Kind and sizes of the model.
        seed: Seed of the initial weights.
        cases: Options of the dynamic cases of the run. Some need other layers.
        loss: For the kind "hf", a loss of logits and labels, as `from_pretrained` takes it.

    Returns:
        The model for `dynmo.Pipeline`.

    Raises:
        ConfigError: The model cannot be made.
    """
    if not isinstance(options, ModelOptions):
        raise ConfigError("load_model takes dynmo.ModelOptions(...)")
    if options.kind == "hf":
        from dynmo.models.huggingface.model import make

        only_shapes = torch.get_default_device().type == "meta"
        with torch.device("cpu"):
            return make(options, seed, loss, cases, only_shapes=only_shapes)
    if loss is not None:
        raise ConfigError(
            f'loss needs a model of kind "hf", not "{options.kind}"; give a model of your own its '
            "loss where it is made"
        )
    if options.kind in KINDS:
        make = KINDS[options.kind]
        if isinstance(make, str):
            module_name, _, function_name = make.partition(":")
            make = getattr(importlib.import_module(module_name), function_name)
        model = make(options, seed, cases)
    else:
        model = from_function(options.kind.removeprefix("python:"), seed)
    return replace(model, options=options)


def from_function(path: str, seed: int) -> Model:
    """Makes a model of the user's own function.

    It returns a list of layers, (list of layers, loss function), or a `Sequential`. Layers are as
    for `Sequential`. The function is called once, on torch's default device, and its modules are
    handed out when they are built first.
    """
    function = find_own("model.kind =", f"python:{path}")
    first = _called(path, function, seed)
    if isinstance(first.given[0], nn.Module):
        build = _Modules(first, lambda: _called(path, function, seed)).build
    else:
        build = from_factories(first.names, first.given, seed, first.loss, first.tied).build
    try:
        layers = build(())
    except ConfigError as error:
        raise ConfigError(f"model.kind = 'python:{path}': {error}") from error
    return Model(
        tuple(f"{index}.{type(layer).__name__}" for index, layer in enumerate(layers)),
        build,
        _anywhere(first.loss),
        first.tied,
        code=(path.partition(":")[0], *defined_in([function, first.loss])),
        inputs=first.inputs,
        targets=first.targets,
        count=first.count,
    )


class _Modules:
    """The modules that a user's function made. They are handed out once."""

    def __init__(self, first: Sequential, again: Callable[[], Sequential]) -> None:
        self._given: list[nn.Module] | None = first.given
        self._again = again
        self._copies = [copied(index, module) for index, module in enumerate(first.given)]

    def build(self, owned: Collection[int]) -> list[nn.Module]:
        if _is_fake():
            return [as_fakes(layer) for layer in self._copies]
        if not owned:
            return [without_memory(layer) for layer in self._copies]
        layers, self._given = self._given or self._again().given, None
        return [layer if index in owned else layer.to("meta") for index, layer in enumerate(layers)]


def _is_fake() -> bool:
    """True in a run of shapes only."""
    return type(torch.empty(0)) is not Tensor


def _anywhere(loss: Loss) -> Loss:
    """Lets a loss with tensors run on the device of its inputs, and on shapes alone."""
    if not isinstance(loss, nn.Module) or not [*loss.parameters(), *loss.buffers()]:
        return loss

    @wraps(loss, assigned=())  # it has the attributes of the loss, such as `reduction`
    def run(output: Any, targets: Any) -> Tensor:
        if _is_fake():
            return as_fakes(loss)(output, targets)
        like = next(each for each in tree_leaves(output) if isinstance(each, Tensor))
        own = without_memory(loss) if like.is_meta else loss.to(like.device)
        return own(output, targets)

    return run


def _called(path: str, function: Callable[[], object], seed: int) -> Sequential:
    """Calls the user's function. Each call makes the layers anew, from the same bits."""
    with generators_kept(torch.device("cpu")):
        torch.manual_seed(mix(seed, Purpose.INITIAL, 0))
        returned = function()
    if isinstance(returned, Sequential):
        return returned
    pair = returned if isinstance(returned, tuple) and len(returned) == 2 else None
    layers, loss = pair or (returned, next_token_loss)
    try:
        return Sequential(cast(Any, layers), cast(Any, loss))
    except ConfigError as error:
        name = path.partition(":")[2]
        raise ConfigError(
            f"model.kind = 'python:{path}': what {name}() returns: {error}"
        ) from error
