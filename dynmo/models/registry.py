"""The model that options name: one of dynmo's kinds, or a user's own function."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, TypeGuard, cast

import torch
from torch import Tensor, nn

from dynmo.errors import ConfigError, place
from dynmo.kernels.seeds import Purpose, generators_kept, mix
from dynmo.kernels.torch_private import tree_leaves
from dynmo.models import emulated, gpt
from dynmo.models.copies import as_fakes, without_memory
from dynmo.models.loss import Counter, Loss, counter_of, next_token_loss
from dynmo.models.model import Factory, Model, check_layers, check_loss, defined_in, from_factories
from dynmo.models.options import ModelOptions
from dynmo.models.sequential import Sequential
from dynmo.models.tied import Pair

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

        return make(options, seed, loss)
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


class _Returned(NamedTuple):
    """What the user's function returned."""

    layers: list[nn.Module] | list[Factory]
    loss: Loss
    tied: tuple[Pair, ...] = ()
    counter: Counter | None = None
    targets: tuple[str, ...] = ("labels",)
    inputs: tuple[str, ...] = ()


def from_function(path: str, seed: int) -> Model:
    """Makes a model of the user's own function.

    It returns a list of layers, (list of layers, loss function), or a `Sequential`. Layers are as
    for `Sequential`. The function is called once, on torch's default device, and its modules are
    handed out when they are built first.
    """
    where = f"model.kind = 'python:{path}'"
    found = _find_function(where, path)
    function = partial(_call, where, path.partition(":")[2], found, seed)
    first = function()
    layers = _Layers(first, function, seed)
    # Tensors of a loss are made with the layers, so shapes alone have a loss of their own. The key
    # says what tensors it has.
    losses: dict[tuple[type[Tensor], bool], Loss] = {(Tensor, _on_meta()): first.loss}

    def loss(output: Any, targets: Any) -> Tensor:
        device = next((x.device for x in tree_leaves(output) if isinstance(x, Tensor)), None)
        key = _tensor_type(), device is not None and device.type == "meta"
        if key not in losses:
            losses[key] = function().loss
        own = losses[key]
        if isinstance(own, nn.Module):
            own.to(device)
        return own(output, targets)

    return Model(
        layers.names,
        layers.build,
        first.loss if _keeps_no_tensor(first.loss) else loss,
        first.tied,
        code=(path.partition(":")[0], *defined_in([found, first.loss])),
        inputs=first.inputs,
        targets=first.targets,
        count=first.counter,
    )


class _Layers:
    """The layers of a user's function, which is called again only if there is no other way.

    Attributes:
        names: Index and class of each layer.
    """

    def __init__(self, first: _Returned, function: Callable[[], _Returned], seed: int) -> None:
        self._function, self._seed, self._tied = function, seed, first.tied
        # Real modules, until they are handed out.
        self._whole: list[nn.Module] | None = None
        # Copies without memory, if all layers can be copied.
        self._copies: list[nn.Module] | None = None
        self._factories: list[Factory] = []
        if not _are_modules(first.layers):
            self._factories = cast("list[Factory]", first.layers)
            layers = self._copies = self._made(self._factories, ())
        elif _on_meta():
            layers = self._copies = first.layers
        else:
            layers = self._whole = first.layers
        self.names = tuple(f"{i}.{type(x).__name__}" for i, x in enumerate(layers))

    def build(self, owned: Collection[int]) -> list[nn.Module]:
        known = self._whole or self._copies
        is_fake = _tensor_type() is not Tensor
        if known is not None and (is_fake or not owned):
            copies = _copied(known, as_fakes if is_fake else without_memory)
            if copies is not None:
                return copies
        if self._factories:
            copies = _copied(self._copies or [], without_memory)
            factories = [
                make if copies is None or index in owned else partial(copies.__getitem__, index)
                for index, make in enumerate(self._factories)
            ]
            return self._made(factories, owned)
        if is_fake or self._whole is None:
            layers = cast("list[nn.Module]", self._function().layers)
        else:
            layers, self._whole = self._whole, None
            self._copies = _copied(layers, without_memory)
        return [layer if index in owned else layer.to("meta") for index, layer in enumerate(layers)]

    def _made(self, factories: Sequence[Factory], owned: Collection[int]) -> list[nn.Module]:
        names = [""] * len(factories)
        made = from_factories(names, factories, self._seed, next_token_loss, self._tied)
        return made.build(owned)


def _copied(
    layers: Sequence[nn.Module], copy: Callable[[nn.Module], nn.Module]
) -> list[nn.Module] | None:
    """Returns copies, or None if some layer cannot be copied."""
    try:
        return [copy(layer) for layer in layers]
    except Exception:  # whatever the attributes of the user's modules raise
        return None


def _keeps_no_tensor(loss: Loss) -> bool:
    if isinstance(loss, nn.Module):
        return next(chain(loss.parameters(), loss.buffers()), None) is None
    if not isinstance(loss, FunctionType) or loss.__closure__ is not None:
        return False
    defaults = (*(loss.__defaults__ or ()), *(loss.__kwdefaults__ or {}).values())
    return not any(isinstance(value, Tensor) for value in defaults)


def _on_meta() -> bool:
    return torch.empty(0).is_meta


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


def _call(where: str, name: str, function: Callable[[], object], seed: int) -> _Returned:
    """Calls the user's function. Each call makes the layers anew, from the same bits."""
    try:
        with generators_kept(torch.device("cpu")):
            torch.manual_seed(mix(seed, Purpose.INITIAL, 0))
            returned = function()
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{where}: {name}() raised {_describe(error)}") from error
    layers, loss = (
        (returned.given, returned.loss)
        if isinstance(returned, Sequential)
        else returned
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
            "that make one each, (list, loss), or a dynmo.Sequential"
        )
    check_loss(where, loss, list(layers))
    if isinstance(layers[0], nn.Module):
        check_layers(where, list(layers))
        used = list(layers)
    else:
        used = [partial(_make_layer, where, index, make) for index, make in enumerate(layers)]
    if isinstance(returned, Sequential):
        rest = returned.tied, returned.count, returned.targets, returned.inputs
        return _Returned(used, returned.loss, *rest)
    return _Returned(used, cast(Loss, loss), counter=counter_of(loss))


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
