"""What a model's own code gives its blocks: masks, rotary positions and other constants.

A frame is a skeleton whose blocks are recorders. It runs once for each microbatch and rank. All
blocks of the rank take their arguments from it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dynmo.kernels.split import LOW
from dynmo.models.huggingface.adapter_names import base_name
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
from dynmo.models.huggingface.types import Types, cast_buffers

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
        types: The types of buffers in each precision. None leaves them as they are.
    """

    def __init__(
        self,
        structure: Structure,
        shared: dict[str, nn.Module],
        router: RouterLoss | None = None,
        types: Types | None = None,
    ) -> None:
        self.structure, self.shared = structure, shared
        self.router, self.types = router, types
        self._recorders: list[Recorder] = []
        # What stands for modules that other layers own.
        self.stand_ins: list[tuple[str, StandIn]] = []
        whole = skeleton(structure.model, structure.blocks, self._unit, self._recorder)
        self._base = whole.get_submodule(structure.base).eval()
        # Modules that hold the blocks. Their buffers move with the rank.
        self.spine = spine_in(whole, structure)
        self._width = embedding_width(structure.model, structure.hidden)
        self._moved: tuple[torch.device, torch.dtype] | None = None
        self._known: list[tuple[_Key, list[Arguments]]] = []

    def _unit(self, path: str, module: nn.Module) -> nn.Module:
        is_after = path in self.structure.after and path not in self.structure.before
        if is_after or isinstance(module, nn.modules.dropout._DropoutNd):
            return PassedOver(module)
        return self.stand_in(path, module) if has_weights(module) else Borrowed(self.shared[path])

    def stand_in(self, path: str, module: nn.Module) -> StandIn:
        self.stand_ins.append((path, StandIn(module)))
        return self.stand_ins[-1][1]

    def _recorder(self, index: int, block: nn.Module) -> Recorder:
        self._recorders.append(Recorder(block, self.structure.elements[index]))
        return self._recorders[-1]

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
        key = _Key(hidden, mask, positions)
        for known, arguments in self._known:
            if known.is_same(key):
                return arguments[block]
        dtype = hidden.dtype if layer is None else precision_of(layer, hidden)
        made = self._run(hidden, dtype, mask, positions)
        self._known = [(key, made), *self._known[: _KEPT - 1]]
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
        forget(self._recorders)
        return made

    def embedded(self, hidden: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns what stands for embedded ids. Its values have no effect, and may be changed."""
        return hidden.new_zeros(*hidden.shape[:2], self._width, dtype=dtype)

    def move(self, device: torch.device, dtype: torch.dtype) -> None:
        """Moves what belongs to no layer to a device and a precision."""
        if (device, dtype) == self._moved:
            return
        types = {} if self.types is None else self.types.at(dtype)
        for path, module in self.shared.items():
            cast_buffers(module.to(device), types, path)
        for path, module in self.spine:
            set_first_parameter(module, device, dtype)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    kind = types.get(f"{path}.{name}".lstrip("."), buffer.dtype)
                    module._buffers[name] = buffer.to(device, kind)
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


def spine_in(whole: nn.Module, structure: Structure) -> list[tuple[str, nn.Module]]:
    """Returns the modules of a skeleton that hold the blocks, by path."""
    return [(path, whole.get_submodule(path)) for path in spine_of(structure.blocks)]


def named_inputs(mask: Tensor | None, positions: Tensor | None) -> dict[str, Tensor]:
    """Returns the inputs beside the ids, by the names of transformers."""
    given = {"attention_mask": mask, "position_ids": positions}
    return {name: value for name, value in given.items() if value is not None}
