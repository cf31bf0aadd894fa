"""A model from a list of layers: what `dynmo.Sequential` makes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from dynmo.counterparts import names_checked
from dynmo.errors import ConfigError
from dynmo.kernels.deferral import uninstall
from dynmo.models.copies import copied
from dynmo.models.loss import Counter, Loss, counter_of, is_sum, next_token_loss
from dynmo.models.model import (
    Factory,
    Model,
    check_layers,
    check_loss,
    defined_in,
    from_factories,
    named_tensors,
)
from dynmo.models.tied import Pair, pairs_of, untie

# Elements of each tensor that enter a fingerprint.
_SAMPLE = 64


class Sequential(Model):
    """Layers in the order in which they run.

    Each layer is the smallest unit that moves.

    Give modules, or functions without arguments that make one module each. A function runs only on
    the rank that holds the layer, under a random seed of the layer's own. Modules are made on every
    rank, so call `torch.manual_seed` with the same number on all ranks before making them. The
    modules that a rank holds are trained in place. It needs no memory for the others.

    A layer takes what the layer before it returns: a tensor, or a tuple of tensors. The first layer
    takes the inputs. The loss takes what the last layer returns, and the targets.

    Args:
        layers: Modules, or functions that make one each. At least one per stage.
        loss: Returns the mean loss of a microbatch, a tensor without dimensions. The default is the
            cross entropy of logits [..., vocabulary] and token ids [...]. A loss with
            `reduction="sum"`, an argument or an attribute as in torch, is added up instead.
        names: One name per layer, for messages and checkpoints. The default is the index and the
            module's class.
        seed: Seeds the functions.
        inputs: Names in a batch that the first layer takes, in the order of its arguments. The
            default is the names of these arguments.
        targets: Names in a batch that the loss takes. One name gives it a tensor, several give it a
            dictionary.
        count: Takes the targets of a microbatch, and returns how many of them its loss is the mean
            of. A step's loss is the mean over all of them. Cross entropy needs none: a target of
            -100 does not count. None for another loss means that microbatches count alike.
        tied: Pairs of (layer, parameter) that are one weight, such as ((0, "weight"), (9,
            "weight")). The first owns it, and the second starts with its value. Modules may share
            the parameter. The second then gets one of its own, which follows the first.

    Attributes:
        were_used: Whether a layer was part of a pipeline before.

    Raises:
        ConfigError: There is no layer, modules and functions are mixed, a layer could not move, or
            a pair of `tied` is no weight.

    Example:
        >>> from torch import nn
        >>> layers = [nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)]
        >>> model = Sequential(layers, loss=nn.functional.mse_loss)
        >>> model.names
        ('0.Linear', '1.ReLU', '2.Linear')
    """

    were_used: bool

    @names_checked
    def __init__(
        self,
        layers: Sequence[nn.Module] | Sequence[Factory] | nn.Sequential,
        loss: Loss = next_token_loss,
        *,
        names: Sequence[str] | None = None,
        seed: int = 0,
        inputs: str | Sequence[str] = (),
        targets: str | Sequence[str] = "labels",
        count: Counter | None = None,
        tied: Iterable[Pair] = (),
    ) -> None:
        given = list(layers) if isinstance(layers, Iterable) else []
        modules = [layer for layer in given if isinstance(layer, nn.Module)]
        is_mixed = len(modules) not in (0, len(given))
        if not given or is_mixed or not all(map(callable, [*given, loss])):
            raise ConfigError(
                "Sequential needs a list of torch modules, or a list of functions that make one "
                "module each, and a loss that can be called"
            )
        if names is not None and len(names) != len(given):
            raise ConfigError(
                f"Sequential has {len(given)} layers, but {len(names)} names; give one name per "
                "layer"
            )
        pairs = pairs_of("Sequential", tied)
        were_used = sum(map(uninstall, modules)) > 0
        check_loss("Sequential", loss, given)
        if modules:
            untie("Sequential", modules, pairs)
            check_layers("Sequential", modules)
            named = names or [
                f"{index}.{type(module).__name__}" for index, module in enumerate(modules)
            ]
            build, code = _builder(modules), ()
        else:
            factories = [layer for layer in given if not isinstance(layer, nn.Module)]
            named = names or [f"layer-{index}" for index in range(len(factories))]
            build = from_factories(named, factories, seed, loss, pairs).build
            code = tuple(defined_in(factories))
        super().__init__(
            tuple(named),
            build,
            loss,
            pairs,
            code=code,
            inputs=_names(inputs),
            targets=_names(targets),
            count=None if is_sum(loss) else count or counter_of(loss),
        )
        object.__setattr__(self, "_given", given)
        object.__setattr__(self, "were_used", were_used)

    @property
    def prefixes(self) -> tuple[str, ...]:
        """The index of each layer, as in `torch.nn.Sequential`."""
        return tuple(map(str, range(self.layers)))

    def fingerprints(self) -> list[str]:
        """Returns a digest of some values of each weight and buffer, by layer.

        There are none if each layer is made on the rank that holds it.
        """
        return [_fingerprint(layer) for layer in self.given if isinstance(layer, nn.Module)]

    @property
    def given(self) -> list[Any]:
        """The modules, or the functions that make them, as a user has them."""
        return self.__dict__["_given"]


def _names(given: str | Sequence[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def _fingerprint(module: nn.Module) -> str:
    digest = hashlib.sha256()
    for what, name, tensor in named_tensors(module):
        digest.update(f"{what} {name} {tuple(tensor.shape)}".encode())
        if not tensor.is_meta and tensor.layout == torch.strided:
            sample = tensor.detach().flatten()[:_SAMPLE].cpu()
            digest.update(sample.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _builder(modules: Sequence[nn.Module]) -> Callable[[Collection[int]], list[nn.Module]]:
    def build(owned: Collection[int]) -> list[nn.Module]:
        return [
            module if index in owned else copied(index, module)
            for index, module in enumerate(modules)
        ]

    return build
