"""What a model's own code gives its blocks: masks, rotary positions and other constants.

A frame is a skeleton whose blocks are recorders. It runs once for each microbatch and rank. All
blocks of the rank take their arguments from it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dynmo.models.huggingface.router import RouterLoss
from dynmo.models.huggingface.skeleton import (
    Borrowed,
    PassedOver,
    StandIn,
    set_first_parameter,
    skeleton,
    spine_of,
)
from dynmo.models.huggingface.structure import (
    Arguments,
    Recorder,
    Structure,
    embedding_width,
    forget,
    has_weights,
)
from dynmo.models.huggingface.transformers_private import on_shapes

# Microbatches whose arguments are kept. Recomputation comes back to an earlier microbatch.
_KEPT = 2


class _Key:
    """What the arguments of the blocks depend on.

    It holds mask and positions, so that no other tensor gets their memory.
    """

    def __init__(self, hidden: Tensor, mask: Tensor | None, positions: Tensor | None) -> None:
        self._form = (hidden.shape, hidden.dtype, hidden.device, type(hidden))
        self._given = (mask, positions)
        self._versions = [None if x is None else x._version for x in self._given]

    def is_same(self, other: _Key) -> bool:
        return (
            self._form == other._form
            and self._versions == other._versions
            and all(map(_is_same_memory, self._given, other._given))
        )


def _is_same_memory(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or one is other:
        return one is other
    # A fake tensor has no memory.
    return (
        type(one) is type(other) is Tensor
        and (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        and one.data_ptr() == other.data_ptr()
    )


class Frame:
    """Makes the arguments of the blocks on one rank.

    Args:
        shared: Modules without weights, by path. They run on the device of the hidden states.
        router: The loss of the routers, if there is one.
    """

    def __init__(
        self, structure: Structure, shared: dict[str, nn.Module], router: RouterLoss | None = None
    ) -> None:
        self.structure, self.shared, self.router = structure, shared, router
        self._recorders: list[Recorder] = []
        whole = skeleton(structure.model, structure.blocks, self._unit, self._recorder)
        self._base = whole.get_submodule(structure.base).eval()
        # Modules that hold the blocks. Their buffers move with the rank.
        self.spine = [whole.get_submodule(path) for path in spine_of(structure.blocks)]
        self._width = embedding_width(structure.model, structure.hidden)
        self._moved: tuple[torch.device, torch.dtype] | None = None
        self._known: list[tuple[_Key, list[Arguments]]] = []

    def _unit(self, path: str, module: nn.Module) -> nn.Module:
        is_after = path in self.structure.after and path not in self.structure.before
        if is_after or isinstance(module, nn.modules.dropout._DropoutNd):
            return PassedOver(module)
        return StandIn(module) if has_weights(module) else Borrowed(self.shared[path])

    def _recorder(self, index: int, block: nn.Module) -> Recorder:
        self._recorders.append(Recorder(block, self.structure.elements[index]))
        return self._recorders[-1]

    def arguments(
        self, block: int, hidden: Tensor, mask: Tensor | None, positions: Tensor | None
    ) -> Arguments:
        """Returns the arguments of a block.

        Args:
            hidden: The hidden states [rows, tokens, width]. Only shape, type and device count.
            mask: The attention mask of the batch.
            positions: The position ids of the batch.
        """
        key = _Key(hidden, mask, positions)
        for known, arguments in self._known:
            if known.is_same(key):
                return arguments[block]
        made = self._run(hidden, mask, positions)
        self._known = [(key, made), *self._known[: _KEPT - 1]]
        return made[block]

    @torch.no_grad()
    def _run(
        self, hidden: Tensor, mask: Tensor | None, positions: Tensor | None
    ) -> list[Arguments]:
        self.move(hidden)
        given = {"inputs_embeds": self.embedded(hidden), **named_inputs(mask, positions)}
        with on_shapes(hidden):
            self._base(**given, use_cache=False)
        made = [each.arguments for each in self._recorders]
        forget(self._recorders)
        return made

    def embedded(self, hidden: Tensor) -> Tensor:
        """Returns what stands for embedded ids. Its values have no effect, and may be changed."""
        return hidden.new_zeros(*hidden.shape[:2], self._width)

    def move(self, like: Tensor) -> None:
        """Moves what belongs to no layer to the device and the dtype of hidden states."""
        if (like.device, like.dtype) == self._moved:
            return
        for module in self.shared.values():
            module.to(like.device)
        for module in self.spine:
            set_first_parameter(module, like)
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(like.device)
        self._moved = (like.device, like.dtype)


def named_inputs(mask: Tensor | None, positions: Tensor | None) -> dict[str, Tensor]:
    """Returns the inputs beside the ids, by the names of transformers."""
    given = {"attention_mask": mask, "position_ids": positions}
    return {name: value for name, value in given.items() if value is not None}
