"""The model that options name: one of dynmo's kinds, or a user's own function."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn

from dynmo.errors import ConfigError, place
from dynmo.kernels.seeds import Purpose, generators_kept, mix
from dynmo.models import emulated, gpt_config
from dynmo.models.loss import Loss, counter_of, next_token_loss
from dynmo.models.model import Factory, Model, check_layers, defined_in, from_factories, on_meta
from dynmo.models.options import ModelOptions

KINDS: dict[str, Callable[[ModelOptions, int, Mapping[str, Any]], Model]] = {
    "gpt": gpt_config.make,
    "moe": gpt_config.make,
    "emulated": emulated.make,
}


def load_model(options: ModelOptions, seed: int = 0, cases: Iterable[Any] = ()) -> Model:
    """Loads one of dynmo's own models, or makes one of a user's function.

    Args:
        options: Kind and sizes of the model.
        seed: Seed of the initial weights.
        cases: Options of the dynamic cases of the run. Some need other layers.

    Returns:
        The model for `dynmo.Pipeline`.

    Raises:
        ConfigError: The model cannot be made.
    """
    if not isinstance(options, ModelOptions):
        raise ConfigError("load_model takes dynmo.ModelOptions(...)")
    if options.kind in KINDS:
        model = KINDS[options.kind](options, seed, {case.name: case for case in cases})
    else:
        model = from_function(options.kind.removeprefix("python:"), seed)
    return replace(model, options=options)


def from_function(path: str, seed: int) -> Model:
    """Makes a model of the user's own function.

    It returns a list of layers, or (list of layers, loss function). Layers are as for `Sequential`.
    """
    where = f"model.kind = 'python:{path}'"
    found = _find_function(where, path)
    function = partial(_call, where, path.partition(":")[2], found, seed)
    try:
        with torch.device("meta"):
            layers, given = function()
    except ConfigError:  # shapes alone may not be enough: the function may ask for a number
        layers, given = function()
    # Tensors of the loss are made with the layers. In a run of shapes only, they are fake tensors.
    losses: dict[type[Tensor], Loss] = {}

    def build(owned: Collection[int]) -> list[nn.Module]:
        layers, losses[_tensor_type()] = function()
        if not _are_modules(layers):
            return from_factories(names, layers, seed, loss).build(owned)
        return [layer if index in owned else layer.to("meta") for index, layer in enumerate(layers)]

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        own = losses.get(_tensor_type()) or function()[1]
        if isinstance(own, nn.Module):
            own.to(output.device)
        return own(output, targets)

    if not _are_modules(layers):
        with generators_kept(torch.device("cpu")):
            layers = [on_meta(factory) for factory in layers]
    names = tuple(f"{i}.{type(x).__name__}" for i, x in enumerate(layers))
    code = (path.partition(":")[0], *defined_in([found, given]))
    used = next_token_loss if given is next_token_loss else loss
    return Model(names, build, used, code=code, count=counter_of(given))


def _find_function(where: str, path: str) -> Callable[[], object]:
    module_name, _, function_name = path.partition(":")
    if not module_name or not function_name:
        raise ConfigError(f"{where}: expected python:package.module:function")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"{where}: cannot import {module_name}: {error}; run from its folder or install it"
        ) from error
    except (Exception, SystemExit) as error:  # anything that the user's code raises
        raise ConfigError(f"{where}: importing {module_name} raised {_describe(error)}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(
            f"{where}: {module_name} has no function {function_name}{_shadowed_hint(module)}"
        )
    return function


def _call(
    where: str, name: str, function: Callable[[], object], seed: int
) -> tuple[list[nn.Module] | list[Factory], Loss]:
    """Calls the user's function. Each call makes the layers anew, from the same bits."""
    try:
        with generators_kept(torch.device("cpu")):
            torch.manual_seed(mix(seed, Purpose.INITIAL, 0))
            returned = function()
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{where}: {name}() raised {_describe(error)}") from error
    layers, loss = (
        returned
        if isinstance(returned, tuple) and len(returned) == 2
        else (returned, next_token_loss)
    )
    if (
        not isinstance(layers, list | nn.ModuleList | nn.Sequential)
        or not all(callable(x) for x in layers)
        or len({isinstance(x, nn.Module) for x in layers}) != 1
        or not callable(loss)
    ):
        raise ConfigError(
            f"{where}: {name}() must return a list of torch modules or of functions "
            "that make one each, or (list, loss)"
        )
    if isinstance(loss, nn.Module) and any(p.requires_grad for p in loss.parameters()):
        raise ConfigError(
            f"{where}: the loss has parameters that train; make them part of the last layer"
        )
    if isinstance(layers[0], nn.Module):
        check_layers(where, list(layers))
        return list(layers), cast(Loss, loss)
    factories = [
        partial(_make_layer, where, index, factory) for index, factory in enumerate(layers)
    ]
    return factories, cast(Loss, loss)


def _shadowed_hint(module: ModuleType) -> str:
    """Returns a hint if an installed module hides the user's own of the same name."""
    own = Path(f"{module.__name__.replace('.', '/')}.py")
    file = getattr(module, "__file__", None)
    if file is None or not own.is_file() or own.resolve() == Path(file).resolve():
        return ""
    return f"; it was imported from {file}, so rename {own}"


def _are_modules(layers: list[nn.Module] | list[Factory]) -> TypeGuard[list[nn.Module]]:
    return isinstance(layers[0], nn.Module)


def _make_layer(where: str, index: int, factory: Callable[[], object]) -> nn.Module:
    try:
        layer = factory()
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{where}: making layer {index} raised {_describe(error)}") from error
    if not isinstance(layer, nn.Module):
        raise ConfigError(
            f"{where}: what should make layer {index} returned a {type(layer).__name__}, not a "
            "torch module"
        )
    return layer


def _tensor_type() -> type[Tensor]:
    """Returns the class of new tensors: a fake tensor in a run of shapes only."""
    return type(torch.empty(0))


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}{place(error)}"
