"""dynmo's layers of a transformers model: embedding, blocks, and the output layer.

A layer registers the model's own modules under the model's own names. Hidden states go from layer
to layer. The attention mask and the position ids of the batch follow them, if there are any, and
the sums of the routers, if they have a loss.

Each rank has one shared model, a copy of the model whose blocks are recorders. It runs once for
each microbatch. The recorders note what the model's own code gives its blocks: masks, rotary
positions and other constants.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from dynmo.kernels.split import LOW
from dynmo.models.huggingface.attention import AttentionFunction, attention_by, configs_of
from dynmo.models.huggingface.names import adapted, base_name, is_adapter
from dynmo.models.huggingface.private import on_shapes
from dynmo.models.huggingface.probe import ModelStructure, embedding_width
from dynmo.models.huggingface.router import RouterLoss
from dynmo.models.huggingface.stubs import (
    AddsNothing,
    Arguments,
    Borrowed,
    PassedOver,
    StandIn,
    Unowned,
    has_weights,
    hidden_of,
    set_first_parameter,
    spine_of,
    with_stubs,
)

Carried = tuple[Tensor, ...]

TypesAt = Callable[[torch.dtype], Mapping[str, torch.dtype]]
"""Takes a precision. Returns the types of parameters and buffers by their names in the model."""

# Microbatches whose arguments are kept. Recomputation comes back to an earlier microbatch.
_KEPT = 2


def _key_of(hidden: Tensor, *given: Tensor | None) -> tuple[Any, ...]:
    """Returns what the arguments of the blocks depend on. A fake tensor has no memory."""
    keys = [
        (x.shape, x.stride(), x.dtype, x._version, x.data_ptr() if type(x) is Tensor else id(x))
        for x in given
        if x is not None
    ]
    which = [x is None for x in given]
    return hidden.shape, hidden.dtype, hidden.device, type(hidden), which, keys


class SharedModel:
    """What the layers of one rank share of a model. It makes the arguments of the blocks.

    Args:
        weightless: Modules without weights, by path. They run on the device of the hidden states.
        router: The loss of the routers, if there is one.
        types: The types of buffers in each precision.
    """

    def __init__(
        self,
        structure: ModelStructure,
        weightless: dict[str, nn.Module],
        router: RouterLoss | None,
        types: TypesAt,
    ) -> None:
        self.structure, self.weightless = structure, weightless
        self.router, self.types = router, types
        # What stands for modules that other layers own.
        self.stand_ins: list[tuple[str, StandIn]] = []
        whole, self._recorders = with_stubs(
            structure.model, structure.blocks, self._unit, structure.recorder
        )
        self._base = whole.get_submodule(structure.base).eval()
        # Modules that hold the blocks. Their buffers move with the rank.
        self.spine = spine_in(whole, structure)
        self._width = embedding_width(structure.model, structure.hidden)
        self._moved: tuple[torch.device, torch.dtype] | None = None
        # Keys, and what they are made of, so that no other tensor gets its memory.
        self._known: list[tuple[tuple[Any, ...], Any, list[Arguments]]] = []

    def _unit(self, path: str, module: nn.Module) -> nn.Module:
        is_after = path in self.structure.after and path not in self.structure.before
        if is_after or isinstance(module, nn.modules.dropout._DropoutNd):
            return PassedOver(module)
        return (
            self.stand_in(path, module) if has_weights(module) else Borrowed(self.weightless[path])
        )

    def stand_in(self, path: str, module: nn.Module) -> StandIn:
        self.stand_ins.append((path, StandIn(module)))
        return self.stand_ins[-1][1]

    def arguments(
        self,
        block: int,
        hidden: Tensor,
        mask: Tensor | None,
        positions: Tensor | None,
        layer: nn.Module | None = None,
    ) -> Arguments:
        """Returns the arguments of a block.

        Args:
            hidden: The hidden states [rows, tokens, width]. Only shape, type and device count.
            mask: The attention mask of the batch.
            positions: The position ids of the batch.
            layer: The layer that has the block, whose precision counts. None takes that of the
                hidden states.
        """
        key = _key_of(hidden, mask, positions)
        for known, _, arguments in self._known:
            if known == key:
                return arguments[block]
        dtype = hidden.dtype if layer is None else precision_of(layer, hidden)
        made = self._run(hidden, dtype, mask, positions)
        self._known = [(key, (mask, positions), made), *self._known[: _KEPT - 1]]
        return made[block]

    @torch.no_grad()
    def _run(
        self, hidden: Tensor, dtype: torch.dtype, mask: Tensor | None, positions: Tensor | None
    ) -> list[Arguments]:
        self.move(hidden.device, dtype)
        embedded = self.embedded(hidden, dtype)
        given = {"inputs_embeds": embedded, **named_inputs(mask, positions)}
        with on_shapes(hidden):
            self._base(**given, use_cache=False)
        made = [each.arguments for each in self._recorders]
        for each in self._recorders:
            each.forget()
        return made

    def embedded(self, hidden: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns what stands for embedded ids. Its values have no effect, and may be changed."""
        return hidden.new_zeros(*hidden.shape[:2], self._width, dtype=dtype)

    def move(self, device: torch.device, dtype: torch.dtype) -> None:
        """Moves what belongs to no layer to a device and a precision."""
        if (device, dtype) == self._moved:
            return
        types = self.types(dtype)
        for path, module in self.weightless.items():
            for name, buffer in module.to(device).named_buffers(path):
                buffer.data = buffer.data.to(types.get(name, buffer.dtype))
        for path, module in self.spine:
            set_first_parameter(module, device, dtype)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    where = f"{path}.{name}".lstrip(".")
                    module._buffers[name] = buffer.to(device, types.get(where, buffer.dtype))
        for path, each in self.stand_ins:
            each.cast(lambda name, p, at=path: types.get(base_name(f"{at}.{name}"), p.dtype))
        self._moved = (device, dtype)


def precision_of(layer: nn.Module, like: Tensor) -> torch.dtype:
    """Returns the precision that a layer computes in. Some parameters may stay in float32.

    Args:
        like: Has the precision of a layer without parameters.
    """
    kinds = [each.dtype for each in layer.parameters() if each.is_floating_point()]
    return next((each for each in kinds if each in LOW), next(iter(kinds), like.dtype))


def spine_in(whole: nn.Module, structure: ModelStructure) -> list[tuple[str, nn.Module]]:
    """Returns the modules of a copy with stubs that hold the blocks, by path."""
    return [(path, whole.get_submodule(path)) for path in spine_of(structure.blocks)]


def named_inputs(mask: Tensor | None, positions: Tensor | None) -> dict[str, Tensor]:
    """Returns the inputs beside the ids, by the names of transformers."""
    given = {"attention_mask": mask, "position_ids": positions}
    return {name: value for name, value in given.items() if value is not None}


def packed(hidden: Tensor, mask: Tensor | None, positions: Tensor | None) -> Carried:
    """Returns what a layer hands on. A mask [rows, tokens] gets a third dimension.

    So a mask has at least three dimensions, and position ids have two.
    """
    if mask is not None and mask.dim() == 2:
        mask = mask.unsqueeze(1)
    # Copies, because the caller may write to the batch. The shared model knows
    # a microbatch by its memory.
    return (hidden, *(x.clone() for x in (mask, positions) if x is not None))


def without_sums(carried: Carried) -> tuple[Carried, Carried]:
    """Returns what is carried beside the sums of the routers, and these."""
    return tuple(x for x in carried if x.dim() > 1), tuple(x for x in carried if x.dim() == 1)


def unpacked(carried: Sequence[Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """Returns attention mask and position ids of what follows the hidden states."""
    mask = next((x for x in carried if x.dim() > 2), None)
    positions = next((x for x in carried if x.dim() == 2), None)
    return (mask.squeeze(1) if mask is not None and mask.dim() == 3 else mask), positions


class HuggingFaceLayer(nn.Module):
    """A layer that has modules of a transformers model under the model's names.

    Args:
        shared_model: That of this rank.

    Attributes:
        float32_adapters: Whether adapters stay in float32 in any precision.
        base_folder: Folder of the frozen weights that checkpoints leave out. None saves all.
    """

    float32_adapters: bool = False
    base_folder: str | None = None

    def __init__(self, shared_model: SharedModel) -> None:
        super().__init__()
        self._shared_model = Unowned(shared_model)

    @property
    def shared_model(self) -> SharedModel:
        return self._shared_model.value

    @property
    def of_folder(self) -> nn.Module:
        """The part whose names and values are those of the model's folder."""
        return self

    def take(self, of_folder: nn.Module) -> None:
        """Takes the values of `of_folder`, where they are not those of the layer itself."""

    def start_own(self) -> None:
        """Draws the values of what the model of the folder lacks."""

    def types_in(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        """Returns the types of parameters and buffers in a precision, by name.

        An adapter has the type of its weight.
        """
        types = self.shared_model.types(dtype)
        found = dict[str, torch.dtype]()
        for name in (n for n, _ in (*self.named_parameters(), *self.named_buffers())):
            weight = f"{adapted(name)}.weight" if is_adapter(name) else base_name(name)
            if is_adapter(name) and self.float32_adapters:
                found[name] = torch.float32
            elif weight in types:
                found[name] = types[weight]
        return found

    def own(self, path: str, module: nn.Module) -> None:
        """Registers a module under its path in the model."""
        where: nn.Module = self
        *parents, name = path.split(".")
        for parent in parents:
            if parent not in where._modules:
                where.add_module(parent, nn.Module())
            where = where.get_submodule(parent)
        where.add_module(name, module)


class OuterLayer(HuggingFaceLayer):
    """A layer that runs the model's own code around the blocks.

    Args:
        owned: The modules that it owns, by path.
        path: Path of the part that it runs. Empty means the whole model.
    """

    def __init__(
        self, shared_model: SharedModel, owned: Mapping[str, nn.Module], path: str
    ) -> None:
        super().__init__(shared_model)
        for where, module in owned.items():
            self.own(where, module)
        structure = shared_model.structure

        def unit(where: str, module: nn.Module) -> nn.Module:
            if where in owned:
                return owned[where]
            if where in shared_model.weightless:
                return Borrowed(shared_model.weightless[where])
            return (
                shared_model.stand_in(where, module)
                if where in structure.before
                else PassedOver(module)
            )

        whole, recorders = with_stubs(structure.model, structure.blocks, unit, structure.recorder)
        spine = spine_in(whole, structure)
        shared_model.spine += spine
        self._recorders = Unowned(recorders)
        self._spine, self._runs = Unowned(spine), Unowned(whole.get_submodule(path))

    def run_model(self, mask: Tensor | None, positions: Tensor | None, **inputs: Tensor) -> Any:
        given = next(iter(inputs.values()))
        self.shared_model.move(given.device, precision_of(self, given))
        for _, module in self._spine.value:
            module.training = self.training
        with on_shapes(given):
            return self._runs.value(**inputs, **named_inputs(mask, positions), use_cache=False)

    def _forget(self) -> None:
        for each in self._recorders.value:
            each.forget()


class EmbeddingLayer(OuterLayer):
    """The first layer: everything that the model runs before its first block."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Carried:
        if attention_mask is not None and not attention_mask.numel():
            attention_mask = None  # a batch with position ids alone
        self.run_model(attention_mask, position_ids, input_ids=input_ids)
        hidden = self._recorders.value[0].taken
        assert hidden is not None
        self._forget()
        carried = packed(hidden, attention_mask, position_ids)
        router = self.shared_model.router
        return carried if router is None else (*carried, *router.start(hidden.device))


class HeadLayer(OuterLayer):
    """The last layer: everything that the model runs after its last block.

    It returns logits, and the loss of the routers if there is one.
    """

    def forward(self, hidden: Tensor, *carried: Tensor) -> Any:
        logits = self.logits(hidden, *unpacked(carried))
        router, (_, sums) = self.shared_model.router, without_sums(carried)
        return logits if router is None else (logits, router.loss(*sums))

    def logits(
        self, hidden: Tensor, mask: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        self._recorders.value[-1].given = hidden
        try:
            embedded = self.shared_model.embedded(hidden, precision_of(self, hidden))
            return self.run_model(mask, positions, inputs_embeds=embedded).logits
        finally:
            self._recorders.value[-1].given = None
            self._forget()

    def inputs_of_a_piece(self, carried: Carried) -> Carried:
        """Returns what is carried beside the hidden states of some tokens.

        Masks and positions have done their work before the last block.
        """
        return without_sums(carried)[1]


class BlockLayer(HuggingFaceLayer):
    """A block, or one half of it.

    Args:
        index: Index of the block.
        block: The block. Of a half, a copy in which the other half adds nothing.

    Attributes:
        attention_function: Computes the attention. None: the block's own code does. Only layers
            whose attention is asked of transformers' interface have it.
    """

    attention_function: AttentionFunction | None

    def __init__(self, shared_model: SharedModel, index: int, block: nn.Module) -> None:
        super().__init__(shared_model)
        structure = shared_model.structure
        self.own(structure.block_path(index), block)
        self.index, self._block = index, Unowned(block)
        where = structure.attention[index]
        if where is not None and not isinstance(_first_on(where, block), AddsNothing):
            self.attention_function = None
        self._configs = Unowned(configs_of(block))

    @property
    def block(self) -> nn.Module:
        return self._block.value

    def forward(self, hidden: Tensor, *carried: Tensor) -> Carried:
        mask, positions = unpacked(carried)
        return self.run(hidden, carried, self.arguments(hidden, mask, positions), mask)

    def arguments(self, hidden: Tensor, mask: Tensor | None, positions: Tensor | None) -> Arguments:
        return self.shared_model.arguments(self.index, hidden, mask, positions, self)

    def run(
        self, hidden: Tensor, carried: Carried, arguments: Arguments, mask: Tensor | None
    ) -> Carried:
        """Runs the block. The mask tells which tokens count for the loss of the routers."""
        router, block, (args, kwargs) = self.shared_model.router, self.block, arguments
        with on_shapes(hidden), self._attention():
            if router is None:
                return (hidden_of(block(hidden, *args, **kwargs)), *carried)
            with router.noted(block) as logits:
                out = hidden_of(block(hidden, *args, **kwargs))
        kept, (probabilities, counts) = without_sums(carried)
        for each in logits:
            probabilities, counts = router.added(probabilities, counts, each, mask)
        return (out, *kept, probabilities, counts)

    def _attention(self) -> AbstractContextManager[None]:
        function = getattr(self, "attention_function", None)
        return nullcontext() if function is None else attention_by(function, self._configs.value)


def _first_on(path: str, block: nn.Module) -> nn.Module:
    """Returns the child of a block on the way to a module."""
    return block.get_submodule(path.partition(".")[0])
