"""Builds the layers of a transformers model, with values for those that a rank holds."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from dynmo.kernels.seeds import generators_kept
from dynmo.kernels.torch_private import unset_fake_temporarily
from dynmo.models.huggingface.adapter_names import base_name
from dynmo.models.huggingface.cut import Halves, half_of
from dynmo.models.huggingface.frame import Frame
from dynmo.models.huggingface.halves_check import check_halves, kind_of
from dynmo.models.huggingface.progress import Progress
from dynmo.models.huggingface.router import RouterLoss
from dynmo.models.huggingface.shells import BlockShell, EmbeddingShell, HeadShell, Shell
from dynmo.models.huggingface.skeleton import units_of
from dynmo.models.huggingface.structure import Structure, has_weights
from dynmo.models.huggingface.transformers_private import initialise
from dynmo.models.huggingface.types import Types
from dynmo.models.huggingface.values import check_values, has_no_values, marked
from dynmo.models.model import check_layers
from dynmo.models.tied import Pair

Fill = Callable[[int, nn.Module], None]
"""Takes the index of a layer and the layer, whose tensors have memory. Sets their values."""


@dataclass(frozen=True)
class Place:
    """A layer of dynmo in a transformers model.

    Attributes:
        name: Name of the layer.
        block: Index of the block. None for embedding and head.
        half: 0 for attention, 1 for the feed-forward. None for a whole block.
    """

    name: str
    block: int | None = None
    half: int | None = None


def places(halves: Sequence[Halves | None]) -> list[Place]:
    """Returns the layers of a model whose blocks are cut like this."""
    between = list[Place]()
    for index, each in enumerate(halves):
        if each is None:
            between.append(Place(f"blocks.{index}", index))
        else:
            between.append(Place(f"blocks.{index}.attention", index, 0))
            between.append(Place(f"blocks.{index}.feed-forward", index, 1))
    return [Place("embedding"), *between, Place("head")]


class Builder:
    """Builds layers. Each call makes modules of its own.

    Args:
        halves: How each block is cut. None leaves it whole.
        fill: Sets the values of a layer's parameters and buffers.
        router: The loss of the routers, if there is one.

    Attributes:
        places: The layers.
        frozen: Indices of the layers that do not train. May be set before layers are built.
        float32_adapters: Whether adapters stay in float32 in any precision. May be set, too.
        types: The types of tensors in each precision. May be set, too.
        base_folder: Folder of the frozen weights that checkpoints leave out. May be set, too.
    """

    def __init__(
        self,
        structure: Structure,
        halves: Sequence[Halves | None],
        fill: Fill,
        router: RouterLoss | None = None,
    ) -> None:
        self._structure, self._halves, self._fill = structure, halves, fill
        self._router = router
        self.places = places(halves)
        self.frozen: Collection[int] = ()
        self.float32_adapters = False
        self.types: Types | None = None
        self.base_folder: str | None = None

    def build(self, owned: Collection[int]) -> list[nn.Module]:
        """Returns all layers. Those that are not owned are on the meta device."""
        # A dry run builds layers with another default device.
        with generators_kept(torch.device("cpu")), torch.device("cpu"):
            frame = Frame(self._structure, self._shared(), self._router, self.types)
            layers = [self._shell(frame, place) for place in self.places]
            for layer in layers:
                untie_within(layer)
            for index in self.frozen:
                layers[index].requires_grad_(False)
            for layer in layers:
                layer.base_folder = self.base_folder
                layer.float32_adapters = self.float32_adapters
            progress = Progress(len(owned))
            for number, index in enumerate(sorted(owned), 1):
                give_memory(layers[index])
                self._fill(index, layers[index])
                check_values(layers[index])
                progress.tell(number)
            self._check_cuts(layers, owned)
        modules: list[nn.Module] = [*layers]
        check_layers("dynmo.huggingface", modules)
        return modules

    def tied(self) -> tuple[Pair, ...]:
        """Returns the weights that two layers share, or that a layer has under two names."""
        model = self._structure.model
        homes = {
            name: index
            for index, layer in enumerate(self.build(()))
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
        return tuple(pairs)

    def _check_cuts(self, layers: Sequence[nn.Module], owned: Collection[int]) -> None:
        """Compares one block of each kind with its halves, if this rank holds both."""
        checked = set[object]()
        for index in sorted(owned):
            first, place = layers[index], self.places[index]
            if place.half != 0 or index + 1 not in owned or has_no_values():
                continue
            assert isinstance(first, BlockShell)
            assert place.block is not None
            second, halves = layers[index + 1], self._halves[place.block]
            kind = kind_of(self._structure.block(place.block))
            if kind not in checked and halves is not None and isinstance(second, BlockShell):
                check_halves(first, second, halves)
                checked.add(kind)

    def _shared(self) -> dict[str, nn.Module]:
        """Returns the modules without weights that layers share, with their buffers."""
        model, made = self._structure.model, dict[str, nn.Module]()
        for path in units_of(model, self._structure.blocks):
            module = model.get_submodule(path)
            if not is_owned(module):
                made[path] = _copied(module)
                give_memory(made[path])
                initialise(model, made[path], path)
                check_values(made[path], path)
        return made

    def _shell(self, frame: Frame, place: Place) -> Shell:
        structure = self._structure
        if place.block is not None:
            block = _copied(structure.block(place.block))
            halves = self._halves[place.block]
            if halves is not None and place.half is not None:
                block = half_of(block, halves, place.half)
            return BlockShell(frame, place.block, block)
        is_first = place.name == "embedding"
        owned = {
            path: _copied(structure.model.get_submodule(path))
            for path in (structure.before if is_first else structure.after)
            if is_owned(structure.model.get_submodule(path))
        }
        if is_first:
            return EmbeddingShell(frame, owned, structure.base)
        return HeadShell(frame, owned, "")


def is_owned(module: nn.Module) -> bool:
    """Whether a module belongs to one layer: it has weights, or draws random numbers."""
    return has_weights(module) or isinstance(module, nn.modules.dropout._DropoutNd)


def untie_within(layer: nn.Module) -> None:
    """Gives a weight that a layer has under two names a parameter for each."""
    known = set[int]()
    for module in layer.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) in known:
                module._parameters[name] = copy.deepcopy(parameter)
            known.add(id(parameter))


def _copied(module: nn.Module) -> nn.Module:
    """Copies a module on the meta device, also in a run of shapes only."""
    with unset_fake_temporarily():
        return copy.deepcopy(module)


def give_memory(module: nn.Module) -> None:
    """Gives parameters and buffers memory on the CPU. They have no values yet."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = nn.Parameter(marked(parameter), parameter.requires_grad)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = marked(buffer)
