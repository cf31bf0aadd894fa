"""The model as dynmo needs it: names of layers, how to build one, and the loss."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dynmo.errors import ConfigError, place
from dynmo.kernels.seeds import Purpose, generators_kept, mix
from dynmo.models.extra_state import extra_state_problems
from dynmo.models.loss import Counter, Loss, PieceLoss, counter_of, is_sum
from dynmo.models.options import ModelOptions
from dynmo.models.reach import generators_of
from dynmo.models.tied import Pair, pairs_of, untie

Factory = Callable[[], nn.Module]


@dataclass(frozen=True)
class Model:
    """A list of layers, each of which may live on any rank.

    The initial weights of a layer depend on the seed and its index alone. So every placement starts
    from the same bits.

    Attributes:
        names: Name of each layer, in order.
        build: Takes the indices of this rank's layers. Returns all layers. Those of other ranks are
            on the meta device (shapes without memory).
        loss: Takes (output, targets) and returns the mean loss of a microbatch, or the sum if it
            says so (`sums`).
        tied: Pairs of (layer, parameter) that are one weight. The first owns it.
        takes_targets: Whether the first layer takes inputs and targets of a microbatch in one
            tensor, [microbatch, 2, ...].
        code: Names of modules whose code decides the numbers, beside those of the layers and the
            loss.
        options: The options that the model was made from, if `load_model` made it.
        inputs: Names of the first layer's inputs in a batch that is a dictionary. Empty means the
            names of its forward's arguments.
        gaps: Whether the first layer takes a tensor without elements in place of an optional input
            that a batch lacks.
        check: Takes such a batch and its name in messages. Raises InputError if the model would
            take it otherwise than it says.
        targets: Names of the targets in such a batch. The loss takes one tensor if there is one
            name, and a dictionary of tensors if there are several.
        count: Takes the targets of a microbatch. Returns how many of them the loss counts. None
            means that microbatches count alike.
        router_loss: Takes the last layer's output. Returns the part of the loss that routers add.
        piece_loss: The loss of some tokens, if `loss` does not tell it (`piece_loss_of`).
        work: Work of F, B and W of each layer, compared with others of its kind. None: layers of
            one kind and size have equal work.
    """

    names: tuple[str, ...]
    build: Callable[[Collection[int]], list[nn.Module]]
    loss: Loss
    tied: tuple[Pair, ...] = ()
    takes_targets: bool = False
    code: tuple[str, ...] = ()
    options: ModelOptions | None = None
    inputs: tuple[str, ...] = ()
    gaps: bool = False
    check: Callable[[Mapping[str, Tensor], str], None] | None = None
    targets: tuple[str, ...] = ("labels",)
    count: Counter | None = None
    router_loss: Callable[[Any], Tensor] | None = None
    piece_loss: PieceLoss | None = None
    work: tuple[tuple[float, float, float], ...] | None = None

    @property
    def layers(self) -> int:
        return len(self.names)

    @property
    def prefixes(self) -> tuple[str, ...]:
        """What stands before the names of each layer's parameters in the whole model.

        It is the index, as in `torch.nn.Sequential`. A model of dynmo's own has the layer's name,
        such as "blocks.0.attention".
        """
        # A model from a user's function has names such as "0.Linear".
        listed = all(name.startswith(f"{i}.") for i, name in enumerate(self.names))
        if listed or len(set(self.names)) < self.layers:
            return tuple(map(str, range(self.layers)))
        return self.names

    @property
    def sums(self) -> bool:
        """Whether the loss of a step is the sum of those of its microbatches."""
        return is_sum(self.loss)

    @property
    def given(self) -> Sequence[Any]:
        """The modules, or the functions that make them, as a user has them."""
        return ()

    def full_name(self, layer: int, name: str) -> str:
        """Returns the name of a layer's parameter or buffer in the whole model."""
        return f"{self.prefixes[layer]}.{name}".lstrip(".")

    def first_inputs(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the input of the first layer.

        Args:
            inputs: [..., sequence].
            targets: Like the inputs.

        Returns:
            The inputs, or inputs and targets as [..., 2, sequence].
        """
        return torch.stack((inputs, targets), dim=-2) if self.takes_targets else inputs


class _Uninitialised(TorchFunctionMode):
    """Leaves initial values out, which tensors on the meta device do not have.

    Computing them all the same takes milliseconds a weight.
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
        """True if a tensor lives on that is no parameter or buffer. Nothing would fill it."""
        own = {id(tensor) for _, _, tensor in named_tensors(layer)}
        return any(
            (tensor := each()) is not None and tensor.is_meta and id(tensor) not in own
            for each in self._tensors
        )


def on_meta(factory: Factory) -> nn.Module:
    """Makes a layer whose parameters and buffers are on the meta device.

    Other tensors that the layer keeps are real, because no move would bring them.
    """
    try:
        with torch.device("meta"), _Uninitialised() as tracker:
            layer = factory()
            if not tracker.keeps_others(layer):
                return layer
    except Exception:  # the layer asks for values, which only real tensors have
        pass
    return factory().to("meta")


def from_factories(
    names: Sequence[str],
    factories: Sequence[Factory],
    seed: int,
    loss: Loss,
    tied: Iterable[Pair] = (),
    takes_targets: bool = False,
) -> Model:
    """Makes a model whose layers can be built one by one, each from its own seed."""
    pairs = pairs_of("from_factories", tied)

    def initialised(index: int) -> nn.Module:
        torch.manual_seed(mix(seed, Purpose.INITIAL, index))
        try:
            layer: object = factories[index]()
        except (Exception, SystemExit) as error:
            told = f"{type(error).__name__}: {error}{place(error)}"
            raise ConfigError(f"making layer {index} raised {told}") from error
        if not isinstance(layer, nn.Module):
            kind = type(layer).__name__
            raise ConfigError(f"what should make layer {index} returned a {kind}, not a module")
        return layer

    def build(owned: Collection[int]) -> list[nn.Module]:
        layers = [
            initialised(i) if i in owned else on_meta(partial(initialised, i))
            for i in range(len(factories))
        ]
        untie("from_factories", layers, pairs)
        check_layers("from_factories", layers)
        return layers

    def build_aside(owned: Collection[int]) -> list[nn.Module]:
        with generators_kept(torch.device("cpu")):
            return build(owned)

    return Model(tuple(names), build_aside, loss, pairs, takes_targets, count=counter_of(loss))


def check_layers(where: str, layers: Sequence[nn.Module]) -> None:
    """Refuses layers that would lose something in a move."""
    problem = next(_problems(layers), None)
    if problem is not None:
        raise ConfigError(f"{where}: {problem}")


def check_loss(where: str, loss: object, layers: Sequence[object]) -> None:
    """Refuses a loss that has something to train, or draws from the generator of a layer."""
    if isinstance(loss, nn.Module):
        known = {p for each in layers if isinstance(each, nn.Module) for p in each.parameters()}
        for name, parameter in loss.named_parameters():
            if parameter.requires_grad and parameter not in known:
                raise ConfigError(
                    f"{where}: the loss ({type(loss).__name__}) has the parameter {name}, which no "
                    "optimizer would train; make it a parameter of the last layer, which returns "
                    "(output, parameter) to the loss"
                )
    drawn = {id(generator) for generator in generators_of(loss).values()}
    for index, layer in enumerate(layers):
        for path, generator in generators_of(layer).items() if isinstance(layer, nn.Module) else ():
            if id(generator) in drawn:
                raise ConfigError(f"{where}: the loss and {_shared_generator(index, path)}")


def _shared(first: int, index: int, what: str) -> str:
    return (
        f"layers {first} and {index} share the {what}; layers that may sit on different ranks "
        "cannot share one, so give each its own"
    )


def _shared_generator(index: int, path: str) -> str:
    return (
        f"layer {index} ({path}) draw from one torch.Generator, whose order would depend on the "
        "ranks; give each a generator of its own"
    )


def _problems(layers: Sequence[nn.Module]) -> Iterator[str]:
    owner: dict[int, tuple[int, str]] = {}
    drawn = dict[int, int]()
    tied = list[Pair]()
    for index, layer in enumerate(layers):
        yield from _module_problems(index, layer)
        yield from extra_state_problems(index, layer)
        for path, generator in generators_of(layer).items():
            if (first := drawn.setdefault(id(generator), index)) != index:
                yield f"layer {first} and {_shared_generator(index, path)}"
        for path, part in layer.named_modules():
            first = owner.setdefault(id(part), (index, path))[0]
            later = [name for name, buffer in part._buffers.items() if buffer is None]
            if first != index and later and not type(part).__module__.startswith("torch."):
                yield _shared(first, index, f"buffer {path}.{later[0]}".replace(" .", " "))
        for what, name, tensor in named_tensors(layer):
            yield from _tensor_problems(f"the {what} {name} of layer {index}", tensor)
            first, other = owner.setdefault(id(tensor), (index, name))
            if first != index and what == "parameter":
                tied.append(((first, other), (index, name)))
            elif first != index:
                yield _shared(first, index, f"{what} {name}")
            elif other != name:
                yield (
                    f"layer {index} has one {what} under two names, {other} and {name}; a layer "
                    "that moves or is resumed has each once, so let one module keep it, or use "
                    "one module twice"
                )
    if tied:
        (first, _), (index, name) = tied[0]
        yield (
            f"layers {first} and {index} share the parameter {name}; give each layer its own, or "
            f"say dynmo.Sequential(..., tied={tied})"
        )


def _module_problems(index: int, layer: nn.Module) -> Iterator[str]:
    by_keyword = [
        each.name
        for each in _arguments(layer)
        if each.kind is each.KEYWORD_ONLY and each.default is each.empty
    ]
    if by_keyword:
        yield (
            f"the forward of layer {index} ({type(layer).__name__}) takes {', '.join(by_keyword)} "
            "by keyword alone; a layer gets its inputs by position, so leave out the * before it"
        )
    for name, module in layer.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            yield (
                f"the module {name or 'itself'} of layer {index} is a ScriptModule, whose "
                "parameters cannot be exchanged when it moves; use the module that it was scripted "
                "from"
            )
        if isinstance(module, nn.Embedding) and module.sparse:
            yield (
                f"the embedding {name or 'itself'} of layer {index} has sparse gradients; make it "
                "with sparse=False"
            )


def _arguments(layer: nn.Module) -> Iterable[inspect.Parameter]:
    try:
        return inspect.signature(layer.forward).parameters.values()
    except (TypeError, ValueError):  # it is not written in Python
        return ()


def _tensor_problems(what: str, tensor: Tensor) -> Iterator[str]:
    if isinstance(tensor, nn.parameter.UninitializedParameter | nn.parameter.UninitializedBuffer):
        yield f"{what} has no shape yet (a lazy module); give its size"
    if tensor.requires_grad and not tensor.is_floating_point():
        yield f"{what} is {tensor.dtype} and trains; use torch.view_as_real and train that"
    if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
        yield hook_problem(what)


def hook_problem(what: str) -> str:
    return (
        f"{what} has a hook, which would not move with it, and which W does not call; let a "
        "module's forward, a module's hook or the loss do what it does"
    )


def defined_in(objects: Iterable[object]) -> Iterator[str]:
    """Yields the names of the modules that define objects and their classes."""
    for each in objects:
        while isinstance(each, partial):
            each = cast(object, each.func)
        yield from {kind.__module__ for kind in type(each).__mro__}
        if isinstance(own := getattr(each, "__module__", None), str):
            yield own


def named_tensors(layer: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """Yields ("parameter" or "buffer", name, tensor) as a layer's modules have them.

    Each module comes once, however often it is used.
    """
    for prefix, module in layer.named_modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            yield "parameter", f"{prefix}.{name}".lstrip("."), parameter
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            yield "buffer", f"{prefix}.{name}".lstrip("."), buffer
