"""The weights of the whole model as one dict, and the outputs of a whole batch.

    rank 0   layers 0 1 ──┐                                    ┌──> rank 0: {"0.weight": ...}
    rank 1   layers 2 3 ──┴── one tensor at a time, all ranks ─┴──> rank 1: {}, or the same

A tensor travels as a sum of bytes over all ranks. One rank gives the bytes, and the others give 0.
It travels in host memory (gloo): the wait has a limit, and no GPU needs room for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from dynmo.errors import CheckpointError, RunError
from dynmo.kernels.packed_weight import PackedWeight
from dynmo.plan.partition import Move
from dynmo.runtime.comm.agreement import raised_on_all
from dynmo.runtime.comm.headers import as_bytes
from dynmo.runtime.comm.rank_group import RankGroup
from dynmo.runtime.engine.engine import Engine
from dynmo.runtime.layer.buffers import has_same_bits
from dynmo.runtime.optim.replicas import cut_state
from dynmo.runtime.state.exact_state import entries, exact_state, masters_of
from dynmo.runtime.state.layer_tensors import describe
from dynmo.runtime.state.migration import unpack

_SECTION = "state"


class WholeModel:
    """Gathers and replaces the weights and persistent buffers of all layers.

    All ranks call every method together.
    """

    def __init__(self, engine: Engine) -> None:
        self._layer_store, self._pending = engine.store, engine.pending
        self._name = engine.model.full_name
        # Second name of a tied weight -> first name.
        self._tied = {
            self._name(user, name): self._name(owner, owner_name)
            for (owner, owner_name), (user, name) in engine.model.tied
        }

    def state_dict(self, everywhere: bool = False) -> dict[str, Tensor]:
        everyone = self._pending.final.world.everyone
        receives = everywhere or everyone.rank == 0
        keys, tensors = list[str](), dict[str, Tensor]()
        for index in range(self._layer_store.model.layers):
            state = self._own_state(index, exact=True)
            for key, like in self._announce(index, state).items():
                keys.append(key)
                if key not in self._tied:
                    tensor = self._broadcast(key, like, None if state is None else state[key])
                    if receives:
                        tensors[key] = tensor
        return {key: tensors[self._tied.get(key, key)] for key in keys} if receives else {}

    def load_state_dict(self, state: object) -> None:
        layer_store = self._pending.final
        world, layers = layer_store.world, range(layer_store.model.layers)
        announced = [self._announce(i, self._own_state(i, exact=False)) for i in layers]
        values: Mapping[str, Tensor] | None = None
        with raised_on_all(world, CheckpointError, "rank 0 to check the state"):
            if world.everyone.rank == 0:
                problem = self._problem(state, announced)
                if problem is not None:
                    raise CheckpointError(problem)
                values = cast("Mapping[str, Tensor]", state)
        for index, announcement in enumerate(announced):
            arrived = {
                key: self._broadcast(key, like, None if values is None else values[key])
                for key, like in announcement.items()
                if key not in self._tied
            }
            if index in layer_store.layers:
                self._replace(index, arrived)
        layer_store.tied.publish(())
        layer_store.on_change(layers)

    def _own_state(self, index: int, exact: bool) -> dict[str, Tensor] | None:
        """Returns a layer's state on the rank that gives it, and None on the others."""
        layer_store = self._layer_store
        if index not in layer_store.layers:
            return None
        masters = masters_of(layer_store, index) if exact else {}
        with layer_store.whole(index) as module:
            state = {
                self._name(index, key): tensor
                for key, tensor in exact_state(module, masters).items()
            }
        return state if layer_store.world.replica == 0 else None

    def _announce(self, index: int, state: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        """Tells all ranks the shapes and dtypes of a layer's state. Returns them on "meta"."""
        everyone, what = self._layer_store.world.everyone, f"what layer {index} has"
        text = b""
        if state is not None:
            tensors = {(_SECTION, key): tensor for key, tensor in state.items()}
            text = describe(index, nn.Module(), tensors).model_dump_json().encode()
        length = int(everyone.sum(torch.tensor([len(text)]), what))
        table = torch.zeros(length, dtype=torch.uint8)
        if text:
            table.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        everyone.sum(table, what)
        move = Move(index, self._layer_store.layout.rank_of(index), 0)
        announced = unpack(table.numpy().tobytes(), move, torch.device("meta"))
        return {key: like for (_, key), like in announced.tensors.items()}

    def _broadcast(self, key: str, like: Tensor, value: Tensor | None) -> Tensor:
        """Returns `value` on the CPU of all ranks. It is None on all ranks but one."""
        tensor = torch.zeros(like.shape, dtype=like.dtype)
        if value is not None:
            tensor.copy_(value.detach())
        self._layer_store.world.everyone.sum(as_bytes(tensor), f"the values of {key}")
        return tensor

    def _replace(self, index: int, values: Mapping[str, Tensor]) -> None:
        """Sets the state of one of this rank's layers.

        Parameters and masters keep their memory, so that optimizers and tied weights see the new
        values.
        """
        module = self._layer_store.modules[index]
        optimizer = self._layer_store.optimizers[index]
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        for key, owner, tensor in entries(module):
            value = values.get(self._name(index, key))
            if value is None:  # a tied weight that another layer owns
                continue
            value = value.to(tensor.device)
            name, last = names.get(id(tensor)), key.rpartition(".")[2]
            if isinstance(owner, PackedWeight) and last in owner.packed:
                value = owner.pack(last, value)
            with torch.no_grad():
                tensor.copy_(value)
            if name is not None and name in optimizer.masters:
                optimizer.load(cut_state(optimizer, {f"{name}/master": value}))

    def _problem(self, state: object, announced: list[dict[str, Tensor]]) -> str | None:
        """Returns why the state that rank 0 was given does not fit, or None."""
        if not isinstance(state, Mapping):
            what = "None" if state is None else f"a {type(state).__name__}"
            return f"the state is {what} on rank 0; give rank 0 the dict that state_dict returned"
        expected = {key: like for layer in announced for key, like in layer.items()}
        given = cast("Mapping[str, object]", state)
        missing = next((key for key in expected if key not in given), None)
        if missing is not None:
            return f"the state lacks {missing!r}; give the state of this model's layers"
        unknown = next((key for key in given if key not in expected), None)
        if unknown is not None:
            return f"the state has {unknown!r}, which this model has not; leave it out"
        for key, like in expected.items():
            value = given[key]
            if not isinstance(value, Tensor):
                return f"{key!r} of the state is a {type(value).__name__}, no tensor"
            if value.is_meta or value.layout != torch.strided:
                return f"{key!r} of the state has no values or is sparse"
            if value.shape != like.shape:
                return (
                    f"{key!r} is {list(value.shape)} in the state, {list(like.shape)} in this model"
                )
        tensors = cast("Mapping[str, Tensor]", state)
        for key, owner in self._tied.items():
            if not has_same_bits(tensors[key].detach().cpu(), tensors[owner].detach().cpu()):
                return (
                    f"{owner!r} and {key!r} are one weight of this model, but differ in the state"
                )
        return None


def join_outputs(
    world: RankGroup, microbatches: Mapping[int, object]
) -> Tensor | tuple[Tensor, ...] | None:
    """Concatenates the outputs of the microbatches along the first dimension.

    All ranks call it together.
    """
    outputs = [microbatches[number] for number in sorted(microbatches)]
    joined: Tensor | tuple[Tensor, ...] | None = None
    with raised_on_all(world, RunError, "the outputs of the batch"):
        try:
            if len(outputs) == 1:
                joined = cast("Tensor | tuple[Tensor, ...]", outputs[0])
            elif outputs and isinstance(outputs[0], tuple):
                several = zip(*cast("list[tuple[Tensor, ...]]", outputs), strict=True)
                joined = tuple(torch.cat(parts) for parts in several)
            elif outputs:
                joined = torch.cat(cast("list[Tensor]", outputs))
        except (RuntimeError, TypeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise RunError(
                f"the last layer's outputs of a batch cannot be concatenated ({reason}); call "
                "evaluate without outputs=True"
            ) from None
    return joined
