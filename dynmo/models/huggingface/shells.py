"""dynmo's layers of a transformers model: embedding, blocks, and the output layer.

A layer registers the model's own modules under the model's own names. Hidden states go from layer
to layer. The attention mask and the position ids of the batch follow them, if there are any, and
the sums of the routers, if they have a loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dynmo.models.huggingface.adapter_names import adapted, base_name, is_adapter
from dynmo.models.huggingface.frame import Frame, named_inputs, precision_of, spine_in
from dynmo.models.huggingface.skeleton import (
    Borrowed,
    PassedOver,
    Unowned,
    skeleton,
)
from dynmo.models.huggingface.structure import Recorder, forget
from dynmo.models.huggingface.transformers_private import on_shapes

Carried = tuple[Tensor, ...]


def packed(hidden: Tensor, mask: Tensor | None, positions: Tensor | None) -> Carried:
    """Returns what a layer hands on. A mask [rows, tokens] gets a third dimension.

    So a mask has at least three dimensions, and position ids have two.
    """
    if mask is not None and mask.dim() == 2:
        mask = mask.unsqueeze(1)
    # Copies, because the caller may write to the batch. The frame knows a microbatch by its memory.
    return (hidden, *(x.clone() for x in (mask, positions) if x is not None))


def without_sums(carried: Carried) -> tuple[Carried, Carried]:
    """Returns what is carried beside the sums of the routers, and these."""
    return tuple(x for x in carried if x.dim() > 1), tuple(x for x in carried if x.dim() == 1)


def unpacked(carried: Sequence[Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """Returns attention mask and position ids of what follows the hidden states."""
    mask = next((x for x in carried if x.dim() > 2), None)
    positions = next((x for x in carried if x.dim() == 2), None)
    return (mask.squeeze(1) if mask is not None and mask.dim() == 3 else mask), positions


class Shell(nn.Module):
    """A layer that has modules of a transformers model under the model's names.

    Args:
        frame: The frame of this rank.

    Attributes:
        float32_adapters: Whether adapters stay in float32 in any precision.
        base_folder: Folder of the frozen weights that checkpoints leave out. None saves all.
    """

    float32_adapters: bool = False
    base_folder: str | None = None

    def __init__(self, frame: Frame) -> None:
        super().__init__()
        self._frame = Unowned(frame)

    @property
    def frame(self) -> Frame:
        return self._frame.value

    def types_in(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        """Returns the types of parameters and buffers in a precision, by name.

        An adapter has the type of its weight.
        """
        types = {} if self.frame.types is None else self.frame.types.at(dtype)
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


class EndShell(Shell):
    """A layer that runs the model's own code around the blocks.

    Args:
        owned: The modules that it owns, by path.
        path: Path of the part that it runs. Empty means the whole model.
    """

    def __init__(self, frame: Frame, owned: Mapping[str, nn.Module], path: str) -> None:
        super().__init__(frame)
        recorders = list[Recorder]()
        for where, module in owned.items():
            self.own(where, module)
        structure = frame.structure

        def unit(where: str, module: nn.Module) -> nn.Module:
            if where in owned:
                return owned[where]
            if where in frame.shared:
                return Borrowed(frame.shared[where])
            return (
                frame.stand_in(where, module) if where in structure.before else PassedOver(module)
            )

        def block(index: int, module: nn.Module) -> nn.Module:
            recorders.append(Recorder(module, structure.elements[index]))
            return recorders[-1]

        whole = skeleton(structure.model, structure.blocks, unit, block)
        spine = spine_in(whole, structure)
        frame.spine += spine
        self._recorders = Unowned(recorders)
        self._spine, self._runs = Unowned(spine), Unowned(whole.get_submodule(path))

    def run_model(self, mask: Tensor | None, positions: Tensor | None, **inputs: Tensor) -> Any:
        given = next(iter(inputs.values()))
        self.frame.move(given.device, precision_of(self, given))
        for _, module in self._spine.value:
            module.training = self.training
        with on_shapes(next(iter(inputs.values()))):
            return self._runs.value(**inputs, **named_inputs(mask, positions), use_cache=False)


class EmbeddingShell(EndShell):
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
        forget(self._recorders.value)
        carried = packed(hidden, attention_mask, position_ids)
        router = self.frame.router
        return carried if router is None else (*carried, *router.start(hidden.device))


class HeadShell(EndShell):
    """The last layer: everything that the model runs after its last block.

    It returns logits, and the loss of the routers if there is one.
    """

    def forward(self, hidden: Tensor, *carried: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        mask, positions = unpacked(carried)
        self._recorders.value[-1].given = hidden
        try:
            embedded = self.frame.embedded(hidden, precision_of(self, hidden))
            out = self.run_model(mask, positions, inputs_embeds=embedded)
        finally:
            self._recorders.value[-1].given = None
            forget(self._recorders.value)
        router, (_, sums) = self.frame.router, without_sums(carried)
        return out.logits if router is None else (out.logits, router.loss(*sums))

    def inputs_of_a_piece(self, carried: Carried) -> Carried:
        """Returns what is carried beside the hidden states of some tokens.

        Masks and positions have done their work before the last block.
        """
        return without_sums(carried)[1]


class BlockShell(Shell):
    """A block, or one half of it.

    Args:
        index: Index of the block.
        block: The block. Of a half, a copy in which the other half adds nothing.
    """

    def __init__(self, frame: Frame, index: int, block: nn.Module) -> None:
        super().__init__(frame)
        self.own(frame.structure.block_path(index), block)
        self.index, self._block = index, Unowned(block)

    @property
    def block(self) -> nn.Module:
        return self._block.value

    def forward(self, hidden: Tensor, *carried: Tensor) -> Carried:
        mask, positions = unpacked(carried)
        args, kwargs = self.frame.arguments(self.index, hidden, mask, positions, self)
        router, block = self.frame.router, self.block
        with on_shapes(hidden):
            if router is None:
                return (hidden_of(block(hidden, *args, **kwargs)), *carried)
            with router.noted(block) as logits:
                out = hidden_of(block(hidden, *args, **kwargs))
        kept, (probabilities, counts) = without_sums(carried)
        for each in logits:
            probabilities, counts = router.added(probabilities, counts, each, mask)
        return (out, *kept, probabilities, counts)


def hidden_of(out: Any) -> Tensor:
    """Returns the hidden states of what a block returned."""
    return out[0] if isinstance(out, tuple | list) else out
