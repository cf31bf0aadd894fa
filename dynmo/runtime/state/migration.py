"""Moves layers between ranks.

A layer has weights, gradients, optimizer state, buffers and frozen flags. Its modules have modes,
numbers and strings. A migration moves all layers or none. Everything is received beside the live
model first. Layers change hands only when every rank has all of its new layers. Random state does
not travel: streams are keyed by the layer's global index (`kernels/seeds.py`).

    for each move, in layer order:   source --- length, JSON (names, dtypes, shapes) ---> target
                                     (the target allocates memory)
    all ranks agree that nothing failed
    for each move, in layer order:   source --- the tensors, one after another ---------> target
    sources drop, targets adopt
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor, nn

from dynmo.errors import RunError
from dynmo.plan.partition import Move, Partition
from dynmo.runtime.comm.agreement import share_failures
from dynmo.runtime.comm.headers import (
    DTYPES,
    TAG_MIGRATE,
    bytes_of,
    check_announced,
    on_wire,
    room_for,
)
from dynmo.runtime.comm.rank_group import RankGroup
from dynmo.runtime.layer.census import Scalars, hooks_of, scalars_of, set_modes, set_scalars
from dynmo.runtime.state.layer_tensors import Contents, Manifest, contents, describe, fill


@dataclass(frozen=True)
class Arrival:
    """A layer that has been received and is not yet live.

    Attributes:
        flags: requires_grad of each parameter.
        evaluating: Modules in evaluation mode.
        hooks: Names of hooks (`hooks_of`).
        scalars: Attributes of its modules.
        forms: Forms of its packed weights.
    """

    layer: int
    tensors: Contents
    flags: dict[str, bool]
    evaluating: list[str]
    hooks: list[str]
    scalars: Scalars
    forms: dict[str, str]

    def fill(self, module: nn.Module) -> dict[str, Tensor]:
        """Puts the layer into its module. Returns the optimizer's state."""
        set_modes(module, self.evaluating)
        set_scalars(module, self.scalars)
        return fill(module, self.tensors, self.flags, self.forms)


Packed = tuple[bytes, list[Tensor]]
"""A layer's manifest, and its tensors in the manifest's order."""


class NotMoved(RunError):
    """Some rank could not give or take a layer. All stay where they were."""


@dataclass(frozen=True)
class Migration:
    moved_bytes: int
    seconds: float


def exchange(
    world: RankGroup,
    moves: Sequence[Move],
    leaving: Callable[[Move], Packed],
    check: Callable[[Move, Arrival], None],
    adopt: Callable[[list[Arrival]], None],
    here: Mapping[int, Contents] | None = None,
) -> Migration:
    """Runs the moves, in layer order. All ranks call it together.

    Args:
        leaving: Returns a layer that leaves this rank (`pack`). Called once for each rank to which
            the layer goes.
        check: Raises an error if a layer cannot come here.
        adopt: Makes the new placement live, with the layers that have arrived.
        here: What this rank already has of each layer that comes. `leaving` leaves it out there.

    Raises:
        NotMoved: Some rank could not give or take a layer. Every rank raises it, and the live model
            is untouched on all of them.
    """
    start = time.perf_counter()
    world.open_channels(sorted({(TAG_MIGRATE, move.source, move.target) for move in moves}))
    transit = _Transit(world, here or {})
    for move in moves:
        # Each rank exchanges every manifest, even after a failure. So no rank waits for a manifest
        # that does not come.
        if move.source == world.rank:
            transit.announce(move, leaving)
        elif move.target == world.rank:
            transit.expect(move, check)
    transit.agree()
    arrivals = transit.carry()
    moved = torch.tensor(
        [sum(t.nbytes for arrival in arrivals for t in arrival.tensors.values())],
        dtype=torch.float64,
    )
    world.everyone.sum(moved, "all layers to arrive")
    adopt(arrivals)
    world.barrier("all layers to be adopted")
    return Migration(int(moved), time.perf_counter() - start)


class _Transit:
    """The layers that leave this rank or come to it, in one migration."""

    def __init__(self, world: RankGroup, here: Mapping[int, Contents]) -> None:
        self._world, self._here = world, here
        self._leaving: list[tuple[Move, list[Tensor]]] = []
        self._arrivals: list[tuple[Move, Arrival]] = []
        self._sends: list[tuple[dist.Work, Tensor, Move]] = []
        self._failure: Exception | None = None

    def announce(self, move: Move, leaving: Callable[[Move], Packed]) -> None:
        """Sends the manifest of a layer that leaves, or an empty one if it cannot."""
        text = b""
        try:
            text, tensors = leaving(move)
            self._leaving.append((move, tensors))
        except Exception as error:
            self._failure = self._failure or error
        length = torch.tensor([len(text)])
        manifest = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else None
        self._sends += _send(self._world, move, [length, manifest])

    def expect(self, move: Move, check: Callable[[Move, Arrival], None]) -> None:
        """Receives the manifest of a layer that comes, and allocates its tensors."""
        text = _receive_text(self._world, move)
        try:
            if text:
                arrival = unpack(text, move, self._world.device, self._here.get(move.layer))
                check(move, arrival)
                self._arrivals.append((move, arrival))
        except Exception as error:
            self._failure = self._failure or error

    def agree(self) -> None:
        """Raises NotMoved on all ranks of all replicas if one of them failed until now."""
        failures = share_failures(
            self._world.everyone, self._failure, "all ranks to be ready to move layers"
        )
        if failures:
            ranks, reason = ", ".join(map(str, failures)), next(iter(failures.values()))
            told = f"layers could not be moved (rank {ranks}): {reason}; all stay where they were"
            raise NotMoved(told) from self._failure

    def carry(self) -> list[Arrival]:
        """Sends and receives the layers' tensors. Returns the layers that have come."""
        for move, tensors in self._leaving:
            self._sends += _send(self._world, move, tensors)
        for move, arrival in self._arrivals:
            here = self._here.get(move.layer, {})
            for key, tensor in arrival.tensors.items():
                if key not in here:
                    _take(self._world, move, tensor)
        for work, _, move in self._sends:
            self._world.wait(work, move.target, f"room to send layer {move.layer}")
        self._world.settle()
        return [arrival for _, arrival in self._arrivals]


def pack(layer: int, module: nn.Module, optimizer_state: dict[str, Tensor]) -> Packed:
    """Returns a layer's manifest, and its tensors in the manifest's order."""
    manifest, tensors = described(layer, module, optimizer_state)
    return manifest.model_dump_json().encode(), tensors


def described(
    layer: int, module: nn.Module, optimizer_state: dict[str, Tensor]
) -> tuple[Manifest, list[Tensor]]:
    """Returns what `pack` does, with the manifest before it is written."""
    tensors = contents(module, optimizer_state)
    beside = {"hooks": hooks_of(module), "scalars": scalars_of(module)}
    manifest = describe(layer, module, tensors).model_copy(update=beside)
    return manifest, [t.detach().contiguous() for t in tensors.values()]


def unpack(text: bytes, move: Move, device: torch.device, here: Contents | None = None) -> Arrival:
    """Allocates the tensors that a manifest announces, except those that are `here`.

    Raises:
        RunError: The manifest is damaged, or a dtype cannot travel.
    """
    try:
        manifest = Manifest.model_validate_json(text)
    except ValidationError as error:
        why = str(error).split("\n")[0]
        raise RunError(
            f"the manifest of layer {move.layer} from rank {move.source} cannot be read: {why}"
        ) from None
    assert manifest.layer == move.layer, "all ranks exchange layers in one order"
    for r in manifest.tensors:
        if r.dtype not in DTYPES:
            raise RunError(
                f"layer {move.layer}: {r.section} {r.name} is of {r.dtype}, which cannot travel; "
                f"known are {', '.join(DTYPES)}"
            )
    here, names = here or {}, [(r.section, r.name) for r in manifest.tensors]
    missing = [r for r in manifest.tensors if (r.section, r.name) not in here]
    spec = tuple((DTYPES[r.dtype], tuple(r.shape)) for r in missing)
    check_announced(bytes_of(spec), device, f"layer {move.layer} from rank {move.source}")
    room = iter(room_for(spec, device))
    tensors = {name: here[name] if name in here else next(room) for name in names}
    beside = manifest.evaluating, manifest.hooks, manifest.scalars, manifest.forms
    return Arrival(move.layer, tensors, manifest.flags, *beside)


def _send(
    world: RankGroup, move: Move, tensors: Sequence[Tensor | None]
) -> list[tuple[dist.Work, Tensor, Move]]:
    return [
        (world.send(on_wire(t), move.target, TAG_MIGRATE), t, move)
        for t in tensors
        if t is not None and t.numel()
    ]


def _take(world: RankGroup, move: Move, tensor: Tensor) -> Tensor:
    if tensor.numel():
        work = world.receive(on_wire(tensor), move.source, TAG_MIGRATE)
        world.wait(work, move.source, f"layer {move.layer} to arrive")
    return tensor


def _receive_text(world: RankGroup, move: Move) -> bytes:
    """Receives a manifest. It is empty if the source could not make one."""
    length = int(_take(world, move, torch.zeros(1, dtype=torch.int64)))
    what = f"the manifest of layer {move.layer} from {world.describe_rank(move.source)}"
    check_announced(length, torch.device("cpu"), what)
    return _take(world, move, torch.empty(length, dtype=torch.uint8)).numpy().tobytes()


# -- another mesh ----------------------------------------------------------------------------------

Holders = tuple[tuple[int, ...], ...]
"""Global ranks that hold each layer."""


def holders(partition: Partition, stage_ranks: Sequence[int], replicas: int) -> Holders:
    """Returns the global ranks that hold each layer."""
    owners = (stage_ranks[partition.owner(layer)] for layer in range(partition.layers))
    return tuple(tuple(rank * replicas + replica for replica in range(replicas)) for rank in owners)


def transfers(old: Holders, new: Holders, within_replicas: bool = False) -> tuple[Move, ...]:
    """Lists the moves, in layer order. A rank that already holds a layer gets nothing.

    Args:
        within_replicas: Whether each replica's part of a layer goes to the same replica of the new
            mesh, which has as many. If not, the holders of a layer take turns in giving it.
    """
    moves: list[Move] = []
    for layer, (before, after) in enumerate(zip(old, new, strict=True)):
        if within_replicas:
            moves += [
                Move(layer, *pair) for pair in zip(before, after, strict=True) if pair[0] != pair[1]
            ]
            continue
        have = frozenset(before)
        targets = [rank for rank in after if rank not in have]
        moves += [
            Move(layer, before[turn % len(before)], target) for turn, target in enumerate(targets)
        ]
    return tuple(moves)
