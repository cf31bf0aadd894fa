"""Moves layers between ranks: weights, gradients, optimizer state, buffers, frozen flags. All or nothing.

Everything is received beside the live model first; only when every rank has all of its new layers do they change hands. Random state does
not travel: streams are keyed by the layer's global index (`kernels/seeds.py`).

    for each move, in layer order:   source --- length, JSON (names, dtypes, shapes) ---> target
                                     source --- the tensors, one after another ---------> target
    all ranks agree that nothing failed; sources drop, targets adopt
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor, nn

from dynmo.balance.partition import Move
from dynmo.errors import DynmoError, RunError
from dynmo.runtime.p2p import TAG_MIGRATE
from dynmo.runtime.world import World


class TensorRecord(BaseModel):
    """One tensor on its way. section: parameter, buffer, gradient or optimizer."""

    model_config = ConfigDict(extra="forbid", strict=True)
    section: str
    name: str
    dtype: str
    shape: list[int]
    requires_grad: bool = False


class Manifest(BaseModel):
    """What the source sends of one layer, in order."""

    model_config = ConfigDict(extra="forbid", strict=True)
    layer: int
    tensors: list[TensorRecord]


# The dtypes that may travel; a name that is not here is refused rather than looked up.
DTYPES = {
    str(d).removeprefix("torch."): d
    for d in (
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}

Contents = dict[tuple[str, str], Tensor]


def contents(module: nn.Module, optimizer_state: dict[str, Tensor]) -> Contents:
    """Every tensor a layer consists of, by (section, name)."""
    out: Contents = {("parameter", name): p for name, p in module.named_parameters()}
    out |= {("buffer", name): b for name, b in module.named_buffers()}
    out |= {("gradient", name): p.grad for name, p in module.named_parameters() if p.grad is not None}
    out |= {("optimizer", name): t for name, t in optimizer_state.items()}
    return out


def fill(module: nn.Module, tensors: Contents, flags: dict[str, bool]) -> dict[str, Tensor]:
    """Puts tensors into a module on the meta device (shapes may differ from its own); returns the optimizer's part.

    flags: requires_grad of each parameter.
    """
    for name in [n for n, _ in module.named_parameters()]:
        owner, key = _owner(module, name)
        parameter = nn.Parameter(tensors["parameter", name], requires_grad=flags[name])
        parameter.grad = tensors.get(("gradient", name))
        setattr(owner, key, parameter)
    for name in [n for n, _ in module.named_buffers()]:
        owner, key = _owner(module, name)
        owner._buffers[key] = tensors["buffer", name]
    return {name: t for (section, name), t in tensors.items() if section == "optimizer"}


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, key = name.rpartition(".")
    return module.get_submodule(path), key


@dataclass(frozen=True)
class Arrival:
    """A layer that has been received and is not yet live."""

    layer: int
    tensors: Contents
    flags: dict[str, bool]


@dataclass(frozen=True)
class Migration:
    """What a migration cost, over all ranks."""

    moved_bytes: int
    seconds: float


def exchange(
    world: World,
    moves: Sequence[Move],
    leaving: Callable[[int], tuple[nn.Module, dict[str, Tensor]]],
    adopt: Callable[[list[Arrival]], None],
) -> Migration:
    """Runs the moves. `leaving(layer)` gives a layer of this rank that goes; `adopt(arrivals)` makes the new placement live.

    Raises RunError, with the live model untouched on every rank, if any rank failed to receive.
    """
    start = time.perf_counter()
    world.open_channels(sorted({(TAG_MIGRATE, move.source, move.target) for move in moves}))
    arrivals: list[Arrival] = []
    works: list[tuple[dist.Work, Tensor, int]] = []
    failure: DynmoError | None = None
    try:
        for move in moves:
            if move.source == world.rank:
                works += _send(world, move, *leaving(move.layer))
            elif move.target == world.rank:
                arrivals.append(_receive(world, move))
        for work, _, peer in works:
            world.wait(work, peer, "room to send a layer")
    except DynmoError as error:
        failure = error
    moved = sum(t.nbytes for arrival in arrivals for t in arrival.tensors.values())
    table = torch.tensor([moved, 0.0 if failure is None else 1.0], dtype=torch.float64)
    if failure is not None and not isinstance(failure, RunError):
        raise failure
    world.sum(table, "all layers to arrive")
    if table[1]:
        raise failure or RunError("a layer did not arrive on some rank; nothing was moved")
    adopt(arrivals)
    world.barrier("all layers to be adopted")
    return Migration(int(table[0]), time.perf_counter() - start)


def _send(world: World, move: Move, module: nn.Module, optimizer_state: dict[str, Tensor]) -> list[tuple[dist.Work, Tensor, int]]:
    tensors = contents(module, optimizer_state)
    flags = {name: p.requires_grad for name, p in module.named_parameters()}
    records = [
        TensorRecord(
            section=section,
            name=name,
            dtype=str(t.dtype).removeprefix("torch."),
            shape=list(t.shape),
            requires_grad=section == "parameter" and flags[name],
        )
        for (section, name), t in tensors.items()
    ]
    text = Manifest(layer=move.layer, tensors=records).model_dump_json().encode()
    messages = [torch.tensor([len(text)], dtype=torch.int64), torch.frombuffer(bytearray(text), dtype=torch.uint8)]
    messages += [t.detach().contiguous() for t in tensors.values()]
    key = (TAG_MIGRATE, move.source, move.target)
    return [(world.send(t, move.target, TAG_MIGRATE, key), t, move.target) for t in messages if t.numel()]


def _receive(world: World, move: Move) -> Arrival:
    key = (TAG_MIGRATE, move.source, move.target)

    def take(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
        if tensor.numel():
            world.wait(world.receive(tensor, move.source, TAG_MIGRATE, key), move.source, f"layer {move.layer} to arrive")
        return tensor

    cpu = torch.device("cpu")
    length = int(take([1], torch.int64, cpu))
    try:
        manifest = Manifest.model_validate(json.loads(take([length], torch.uint8, cpu).numpy().tobytes()))
        if manifest.layer != move.layer:
            raise RunError(f"rank {world.rank} expected layer {move.layer} from rank {move.source}, which sent layer {manifest.layer}")
        tensors: Contents = {}
        for r in manifest.tensors:
            # AdamW's step counters live on the CPU whatever the device.
            device = cpu if r.section == "optimizer" and not r.shape else world.device
            tensors[r.section, r.name] = take(r.shape, DTYPES[r.dtype], device)
    except (ValidationError, ValueError, KeyError) as error:
        raise RunError(f"rank {world.rank} could not read layer {move.layer} from rank {move.source}: {error}".split("\n")[0]) from error
    return Arrival(move.layer, tensors, {r.name: r.requires_grad for r in manifest.tensors if r.section == "parameter"})
