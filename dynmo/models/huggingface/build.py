"""Builds the layers of a transformers model, with values for those that a rank holds.

A new tensor has a mark until the code of transformers or peft, or a file, sets its value. A tensor
that all of them forget would be arbitrary.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from dynmo.errors import ConfigError
from dynmo.kernels.seeds import generators_kept
from dynmo.kernels.torch_private import unset_fake_temporarily
from dynmo.models.huggingface.halves import BlockHalves, half_of, keeps_numbers
from dynmo.models.huggingface.kinds import LayerKinds, LayerSpec
from dynmo.models.huggingface.layers import (
    BlockLayer,
    HeadLayer,
    HuggingFaceLayer,
    SharedModel,
    TypesAt,
)
from dynmo.models.huggingface.names import base_name
from dynmo.models.huggingface.private import initialise
from dynmo.models.huggingface.probe import ModelStructure
from dynmo.models.huggingface.router import RouterLoss
from dynmo.models.huggingface.stubs import (
    has_no_values,
    has_weights,
    marked,
    retensored,
    units_of,
)
from dynmo.models.model import check_layers
from dynmo.models.tied import Pair

_logger = logging.getLogger(__name__)

# Seconds between two lines that tell how many layers are read.
_EVERY = 5.0

Fill = Callable[[int, nn.Module], None]
"""Takes the index of a layer and the layer, whose tensors have memory. Sets their values."""

Freeze = int | str | range
"""The index of a block, several of them, or the name of a layer."""


def layer_specs(
    halves: Sequence[BlockHalves | None], heads: Collection[int] = ()
) -> list[LayerSpec]:
    """Returns the layers of a model whose blocks are cut like this.

    Args:
        halves: How each block is cut. None leaves one whole.
        heads: Blocks behind which a further head stands.
    """
    between = list[LayerSpec]()
    for index, each in enumerate(halves):
        if each is None:
            between.append(LayerSpec(f"blocks.{index}", index))
        else:
            between.append(LayerSpec(f"blocks.{index}.attention", index, each))
            between.append(LayerSpec(f"blocks.{index}.feed-forward", index, each, 1))
        if index in heads:
            between.append(LayerSpec(f"blocks.{index}.exit", behind=index))
    return [LayerSpec("embedding"), *between, LayerSpec("head")]


def frozen_layers(
    specs: Sequence[LayerSpec], freeze: Iterable[Freeze], train_last: int | None
) -> frozenset[int]:
    """Returns the indices of the layers that do not train.

    Args:
        specs: The layers of the model.
        freeze: Blocks by index, and layers by name, such as "embedding" or "blocks.0.attention".
        train_last: Number of last blocks that train, with the output layer. All else is frozen.

    Raises:
        ConfigError: There is no such block or layer.
    """
    blocks = 1 + max(spec.block for spec in specs if spec.block is not None)
    names = {spec.name for spec in specs}
    wanted = set[int | str]()
    for each in freeze:
        wanted.update(each if isinstance(each, range) else (each,))
    for each in wanted:
        if (each not in names) if isinstance(each, str) else not 0 <= each < blocks:
            raise ConfigError(
                f"freeze has {each!r}; give blocks 0 to {blocks - 1}, or names of layers, such as "
                f"{specs[0].name!r} or {specs[1].name!r}"
            )
    if train_last is not None:
        if not 0 <= train_last <= blocks:
            raise ConfigError(f"train_last = {train_last}, but the model has {blocks} blocks")
        wanted |= {specs[0].name, *range(blocks - train_last)}
    # Further heads have the weights of the last one.
    names_of = [(spec if spec.behind is None else specs[-1]).name for spec in specs]
    pairs = zip(specs, names_of, strict=True)
    return frozenset(at for at, (spec, name) in enumerate(pairs) if {name, spec.block} & wanted)


@dataclass
class Builder:
    """Builds layers. Each call makes modules of its own.

    Attributes:
        specs: The layers.
        fill: Sets the values of a layer's parameters and buffers.
        router: The loss of the routers, if there is one.
        types: The types of tensors in each precision.
        frozen: Indices of the layers that do not train.
        float32_adapters: Whether adapters stay in float32 in any precision.
        base_folder: Folder of the frozen weights that checkpoints leave out.
        kinds: What makes layers. None: there are no cases.
    """

    structure: ModelStructure
    specs: Sequence[LayerSpec]
    fill: Fill
    router: RouterLoss | None = None
    types: TypesAt = lambda _: {}
    frozen: Collection[int] = ()
    float32_adapters: bool = False
    base_folder: str | None = None
    kinds: LayerKinds | None = None

    def build(self, owned: Collection[int]) -> list[nn.Module]:
        """Returns all layers. Those that are not owned are on the meta device."""
        return [*self._build(owned)]

    def _build(self, owned: Collection[int]) -> list[HuggingFaceLayer]:
        # A dry run builds layers with another default device.
        with generators_kept(torch.device("cpu")), torch.device("cpu"):
            shared_model = SharedModel(self.structure, self._weightless(), self.router, self.types)
            layers = [self._layer(shared_model, spec) for spec in self.specs]
            for index, layer in enumerate(layers):
                _untie_within(layer)
                layer.base_folder = self.base_folder
                layer.float32_adapters = self.float32_adapters
                if index in self.frozen:
                    layer.requires_grad_(False)
            told = time.monotonic()
            for number, index in enumerate(sorted(owned), 1):
                retensored(layers[index], marked)
                self.fill(self._number(index), layers[index])
                _check_values(layers[index])
                if time.monotonic() - told >= _EVERY:
                    told = time.monotonic()
                    _logger.info(f"read {number} of this rank's {len(owned)} layers")
            self._check_cuts(layers, owned)
        check_layers("dynmo.huggingface", [*layers])
        return layers

    def tied(self) -> tuple[Pair, ...]:
        """Returns the weights that two layers share, or that a layer has under two names."""
        model = self.structure.model
        layers = self._build(())
        homes = {
            name: index
            for index, layer in enumerate(layers)
            if self.specs[index].behind is None
            for name, _ in layer.named_parameters()
        }
        uses = dict[int, list[str]]()
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if name in homes:
                uses.setdefault(id(parameter), []).append(name)
        # Files have the weight under the name of its owner.
        users: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
        pairs = list[Pair]()
        for names in uses.values():
            owner, *others = sorted(names, key=lambda name: base_name(name) in users)
            pairs += [((homes[owner], owner), (homes[name], name)) for name in others]
        owners = {user: owner for owner, user in pairs}
        for index, layer in enumerate(layers):
            if self.specs[index].behind is not None:
                names = {id(p): name for name, p in layer.of_folder.named_parameters()}
                for name, parameter in layer.named_parameters():
                    if id(parameter) in names:
                        last = len(layers) - 1, names[id(parameter)]
                        pairs.append((owners.get(last, last), (index, name)))
        return tuple(pairs)

    def _number(self, index: int) -> int:
        """Returns the number of a layer in a model without further heads."""
        specs = [spec for spec in self.specs if spec.behind is None]
        spec = self.specs[index]
        return specs.index(spec) if spec.behind is None else len(specs) - 1

    def _check_cuts(self, layers: Sequence[HuggingFaceLayer], owned: Collection[int]) -> None:
        """Compares one block of each kind with its halves, if this rank holds both.

        A wrong cut would change numbers silently.
        """
        checked = set[object]()
        for index in () if has_no_values() else sorted(owned):
            halves, first = self.specs[index].halves, layers[index]
            if halves is None or self.specs[index].half or index + 1 not in owned:
                continue
            second = layers[index + 1]
            assert isinstance(first, BlockLayer)
            assert isinstance(second, BlockLayer)
            kind = tuple(map(type, self.structure.block(first.index).modules()))
            if kind in checked:
                continue
            checked.add(kind)
            draws = torch.Generator().manual_seed(0)
            hidden = torch.randn(self.structure.hidden.shape, generator=draws)
            arguments = first.shared_model.arguments(first.index, hidden, None, None)
            if not keeps_numbers(first.block, second.block, halves, hidden, arguments):
                raise ConfigError(
                    f"block {first.index} ({type(first.block).__name__}): its halves compute other "
                    'numbers than the whole block; leave blocks whole (cut = "blocks")'
                )

    def _weightless(self) -> dict[str, nn.Module]:
        """Returns the modules without weights that layers share, with their buffers."""
        model, made = self.structure.model, dict[str, nn.Module]()
        for path in units_of(model, self.structure.blocks):
            module = model.get_submodule(path)
            if not _is_owned(module):
                made[path] = _copied(module)
                retensored(made[path], marked)
                initialise(model, made[path], path)
                _check_values(made[path], path)
        return made

    def _layer(self, shared_model: SharedModel, spec: LayerSpec) -> HuggingFaceLayer:
        structure = self.structure
        kinds = self.kinds or LayerKinds(structure.count, structure.hidden.shape[-1], 0.0)
        if spec.block is not None:
            block = _copied(structure.block(spec.block))
            if spec.halves is not None:
                block = half_of(block, spec.halves, spec.half)
            return kinds.block(shared_model, spec, block)
        is_first = spec.name == "embedding"
        units = {
            path: structure.model.get_submodule(path)
            for path in (structure.before if is_first else structure.after)
        }
        owned = {path: _copied(module) for path, module in units.items() if _is_owned(module)}
        if is_first:
            return kinds.embedding(shared_model, owned, structure.base)
        if spec.behind is not None:
            return kinds.heads[spec.behind](HeadLayer(shared_model, owned, ""))
        return kinds.head(shared_model, owned, "")


def _is_owned(module: nn.Module) -> bool:
    """Whether a module belongs to one layer: it has weights, or draws random numbers."""
    return has_weights(module) or isinstance(module, nn.modules.dropout._DropoutNd)


def _untie_within(layer: nn.Module) -> None:
    """Gives a weight that a layer has under two names a parameter for each."""
    known = set[int]()
    for module in layer.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in known:
                module._parameters[name] = copy.deepcopy(parameter)
            known.add(id(parameter))


def _copied(module: nn.Module) -> nn.Module:
    """Copies a module on the meta device, also in a run of shapes only."""
    with unset_fake_temporarily():
        return copy.deepcopy(module)


def _check_values(module: nn.Module, path: str = "") -> None:
    """Refuses parameters and buffers that have no value yet. Fake tensors have none."""
    for name in () if has_no_values() else _unset(module):
        raise ConfigError(
            f"{path}.{name}".lstrip(".") + " has no value, because the model's _init_weights does "
            "not set it; give a folder of weights that has it"
        )


def _unset(module: nn.Module) -> Iterator[str]:
    """Yields the names of tensors whose ends have the mark."""
    for name, tensor in (*module.named_buffers(), *module.named_parameters()):
        if tensor.dtype != torch.bool and not tensor.is_meta and tensor.numel():
            ends = tensor.detach().flatten()[[0, -1]]
            if torch.isclose(ends, marked(ends), rtol=0, atol=0, equal_nan=True).any():
                yield name
