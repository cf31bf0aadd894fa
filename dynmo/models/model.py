"""What dynmo needs to know of a model: the names of its layers, how to build one, and the loss."""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from dynmo.config import Config
from dynmo.errors import ConfigError, place
from dynmo.kernels.seeds import Purpose, generators_kept, mix

Loss = Callable[[Tensor, Tensor], Tensor]
Factory = Callable[[], nn.Module]


@dataclass(frozen=True)
class Model:
    """`build(owned)` gives all layers in order: those in `owned` real, the rest on the meta device (shapes without memory).

    Each layer's initial weights depend on the seed and its global index alone, so that every placement starts from the same bits.
    `tied` names pairs (layer, parameter) that are one weight: the first owns it, the second uses it.
    """

    names: tuple[str, ...]
    build: Callable[[Collection[int]], list[nn.Module]]
    loss: Loss
    tied: tuple[tuple[tuple[int, str], tuple[int, str]], ...] = ()

    @property
    def layers(self) -> int:
        return len(self.names)


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy. logits: [..., vocab], targets: [...] of token ids."""
    return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), targets.reshape(-1))


class _Uninitialised(TorchFunctionMode):
    """Leaves initial values out: what is on the meta device has none, and pretending takes milliseconds a weight.

    Remembers which tensors were made, for `keeps_others`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._tensors: list[weakref.ref[Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given: dict[str, Any] = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else given["tensor"]
        out = func(*args, **given)
        if isinstance(out, Tensor):
            self._tensors.append(weakref.ref(out))
        return out

    def keeps_others(self, layer: nn.Module) -> bool:
        """Whether a tensor lives on that is no parameter or buffer: an attribute of a module, say. Nothing would ever fill it."""
        own = {id(tensor) for _, _, tensor in _tensors(layer)}
        return any((tensor := each()) is not None and tensor.is_meta and id(tensor) not in own for each in self._tensors)


def _on_meta(factory: Factory) -> nn.Module:
    """A layer whose parameters and buffers are on the meta device; what else it keeps is real, since no move would bring it."""
    try:
        with torch.device("meta"), _Uninitialised() as made:
            layer = factory()
            if not made.keeps_others(layer):
                return layer
    except Exception:  # it asks for the value of a tensor, which only real ones have
        pass
    return factory().to("meta")


def from_factories(names: Sequence[str], factories: Sequence[Factory], seed: int, loss: Loss, tied: Any = ()) -> Model:
    """A model whose layers can be built one by one."""

    def initialised(index: int) -> nn.Module:
        torch.manual_seed(mix(seed, Purpose.INITIAL, index))
        return factories[index]()

    def build(owned: Collection[int]) -> list[nn.Module]:
        layers = [initialised(i) if i in owned else _on_meta(partial(initialised, i)) for i in range(len(factories))]
        _check("from_factories", layers)
        return layers

    def build_aside(owned: Collection[int]) -> list[nn.Module]:
        with generators_kept(torch.device("cpu")):
            return build(owned)

    return Model(tuple(names), build_aside, loss, tied)


def from_function(path: str, seed: int) -> Model:
    """`package.module:function`, called without arguments: returns a list of layers, or (list of layers, loss function).

    Layers are modules: all are made on every rank under a fixed seed, and those of other ranks are dropped at once. Or they are functions
    without arguments that make a module each: then a rank makes its own only. Raises ConfigError if the path leads to no such function.
    """
    where = f"model.kind = 'python:{path}'"
    module_name, _, function_name = path.partition(":")
    if not module_name or not function_name:
        raise ConfigError(f"{where}: expected python:package.module:function")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"{where}: cannot import {module_name}: {error}; run from its folder or install it") from error
    except (Exception, SystemExit) as error:  # whatever its own code raises, a slip of the pen too
        raise ConfigError(f"{where}: importing {module_name} raised {_what(error)}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"{where}: {module_name} has no function {function_name}{_elsewhere(module)}")

    def make() -> tuple[list[nn.Module] | list[Factory], Loss]:
        try:
            with generators_kept(torch.device("cpu")):
                torch.manual_seed(mix(seed, Purpose.INITIAL, 0))
                made = function()
        except (Exception, SystemExit) as error:
            raise ConfigError(f"{where}: {function_name}() raised {_what(error)}") from error
        layers, loss = made if isinstance(made, tuple) and len(made) == 2 else (made, next_token_loss)
        if (
            not isinstance(layers, list | nn.ModuleList | nn.Sequential)
            or not all(callable(x) for x in layers)
            or len({isinstance(x, nn.Module) for x in layers}) != 1
            or not callable(loss)
        ):
            raise ConfigError(
                f"{where}: {function_name}() must return a list of torch modules or of functions that make one each, or (list, loss)"
            )
        if isinstance(loss, nn.Module) and any(p.requires_grad for p in loss.parameters()):
            raise ConfigError(f"{where}: the loss has parameters that train; make them part of the last layer")
        if isinstance(layers[0], nn.Module):
            _check(where, list(layers))
            return list(layers), cast(Loss, loss)
        return [partial(_made, where, index, factory) for index, factory in enumerate(layers)], cast(Loss, loss)

    try:
        with torch.device("meta"):
            layers, given = make()
    except ConfigError:  # a number asked of a tensor, say, which shapes alone do not tell
        layers, given = make()
    # What the loss holds is made with the layers: tensors, or fake ones where only shapes are run.
    losses: dict[type[Tensor], Loss] = {}

    def build(owned: Collection[int]) -> list[nn.Module]:
        layers, losses[_kind()] = make()
        if not _are_modules(layers):
            return from_factories(names, layers, seed, loss).build(owned)
        return [layer if index in owned else layer.to("meta") for index, layer in enumerate(layers)]

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        own = losses.get(_kind()) or make()[1]
        if isinstance(own, nn.Module):
            own.to(output.device)
        return own(output, targets)

    if not _are_modules(layers):
        with generators_kept(torch.device("cpu")):
            layers = [_on_meta(factory) for factory in layers]
    names = tuple(f"{i}.{type(x).__name__}" for i, x in enumerate(layers))
    return Model(names, build, next_token_loss if given is next_token_loss else loss)


def _elsewhere(module: ModuleType) -> str:
    """A hint if an installed module hides the user's own of the same name."""
    own = Path(f"{module.__name__.replace('.', '/')}.py")
    file = getattr(module, "__file__", None)
    if file is None or not own.is_file() or own.resolve() == Path(file).resolve():
        return ""
    return f"; it was imported from {file}, so rename {own}"


def _are_modules(layers: list[nn.Module] | list[Factory]) -> TypeGuard[list[nn.Module]]:
    return isinstance(layers[0], nn.Module)


def _made(where: str, index: int, factory: Callable[[], object]) -> nn.Module:
    try:
        made = factory()
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{where}: making layer {index} raised {_what(error)}") from error
    if not isinstance(made, nn.Module):
        raise ConfigError(f"{where}: what should make layer {index} returned a {type(made).__name__}, not a torch module")
    return made


def _kind() -> type[Tensor]:
    """Of the tensors that are made now."""
    return type(torch.empty(0))


def _what(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}{place(error)}"


def _check(where: str, layers: Sequence[nn.Module]) -> None:
    """Raises ConfigError for what would be lost when a layer moves."""
    owner: dict[int, tuple[int, str]] = {}
    for index, layer in enumerate(layers):
        scripted = next((name for name, x in layer.named_modules() if isinstance(x, torch.jit.ScriptModule)), None)
        if scripted is not None:
            raise ConfigError(
                f"{where}: the module {scripted or 'itself'} of layer {index} is a ScriptModule, whose parameters cannot be "
                "exchanged when it moves; use the module that it was scripted from"
            )
        sparse = next((name for name, x in layer.named_modules() if isinstance(x, nn.Embedding) and x.sparse), None)
        if sparse is not None:
            raise ConfigError(
                f"{where}: the embedding {sparse or 'itself'} of layer {index} has sparse gradients; make it with sparse=False"
            )
        for what, name, tensor in _tensors(layer):
            if isinstance(tensor, nn.parameter.UninitializedParameter | nn.parameter.UninitializedBuffer):
                raise ConfigError(f"{where}: the {what} {name} of layer {index} has no shape yet (a lazy module); give its size")
            if tensor.requires_grad and not tensor.is_floating_point():
                raise ConfigError(
                    f"{where}: the {what} {name} of layer {index} is {tensor.dtype} and trains; use torch.view_as_real and train that"
                )
            if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
                raise ConfigError(
                    f"{where}: the {what} {name} of layer {index} has a hook, which would not move with it; let a module's forward or the "
                    "loss do what it does"
                )
            first, other = owner.setdefault(id(tensor), (index, name))
            if first != index:
                raise ConfigError(
                    f"{where}: layers {first} and {index} share the {what} {name}; layers that may sit on different ranks cannot share one"
                )
            if other != name:
                raise ConfigError(
                    f"{where}: layer {index} has one {what} under two names, {other} and {name}; a layer that moves "
                    "or is resumed has each once, so let one module keep it, or use one module twice"
                )


def _tensors(layer: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """Parameters and buffers as a layer's modules have them, each module once however often it is used."""
    for prefix, module in layer.named_modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            yield "parameter", f"{prefix}.{name}".lstrip("."), parameter
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            yield "buffer", f"{prefix}.{name}".lstrip("."), buffer


def load_model(config: Config) -> Model:
    """The model that the config names."""
    from dynmo.models import emulated, gpt

    kind = config.model.kind
    if kind == "gpt":
        return gpt.make(config)
    if kind == "emulated":
        return emulated.make(config)
    return from_function(kind.removeprefix("python:"), config.seed)
