"""Copies of layers in the host memory of the ranks, to go on from if a rank is gone.

    before step 7   own layers of rank 0  --copy-->  rank 0, step 7  --pieces-->  rank 1, step 7
    during step 7   the rank trains; a thread copies and sends while the rank waits for others
    on one machine  nothing is sent: rank 1 reads the memory of rank 0, also once that is gone
    its end         the copies are complete on all ranks before any rank ends the step

A rank keeps its own layers and those of one other rank, of the newest copy and the one before. At
any moment one of the two is complete on all ranks. A layer travels in the form of a move
(`migration.py`). A tensor that has the bits of the step before is not sent again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from dynmo.errors import RankDied
from dynmo.runtime.comm.agreement import share_texts
from dynmo.runtime.comm.headers import DTYPES, TAG_COPY, bytes_of, check_announced
from dynmo.runtime.comm.idle_channel import IdleChannel
from dynmo.runtime.comm.rank_group import RankGroup
from dynmo.runtime.state.layer_tensors import Manifest
from dynmo.runtime.state.migration import described
from dynmo.runtime.state.shared_rooms import Address, OtherRooms, Place, SharedRooms

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

Key = tuple[int, int]
"""A layer's index, and the replica whose part it is. 0 if all replicas hold the same."""


class LayerCopy(NamedTuple):
    """A layer as it moves: its manifest, and its tensors in the manifest's order."""

    text: bytes
    tensors: list[Tensor]


@dataclass
class StepCopy:
    """Layers as they are before a step.

    Attributes:
        number: Number of the call that trains the step. It grows, and a load may go back in steps.
        state: The run's own part, as JSON. The same on every rank.
        is_complete: Whether all that shall be in it is.
    """

    number: int
    state: str = ""
    layers: dict[Key, LayerCopy] = field(default_factory=dict[Key, LayerCopy])
    is_complete: bool = False

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for each in self.layers.values() for t in each.tensors)


class _Index(BaseModel):
    """What a rank sends before the bytes: key, manifest, and which tensors have new bits.

    Attributes:
        places: Where the new ones are in its memory. None: their bytes follow.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    number: int
    layers: list[tuple[int, int, str, list[bool]]]
    places: list[tuple[int, int]] | None


class Copies:
    """The copies that a rank keeps and gets in one generation.

    Args:
        everyone: All ranks.
        target: The rank that keeps this rank's layers, too. None: other replicas have them.
        source: The rank whose layers this rank keeps.
        former: Copies of the generation before. They stay until new ones are complete.
    """

    def __init__(
        self, everyone: RankGroup, target: int | None, source: int | None, former: Copies | None
    ) -> None:
        self._everyone, self._target, self._source = everyone, target, source
        self.own: dict[int, StepCopy] = {}
        self.held: dict[int, StepCopy] = {}
        # Memory that the target reads, and that of the source.
        self._rooms: SharedRooms | None = None
        self._source_rooms: OtherRooms | None = None
        # Copies that another process may overwrite have its rooms beside them.
        self._former = [] if former is None else former._all
        self._spare: dict[tuple[torch.dtype, torch.Size], list[Tensor]] = {}
        self._copied = threading.Event()
        self._copied.set()
        self._peers = [rank for rank in (source, target) if rank is not None]
        self._channel = IdleChannel(everyone, TAG_COPY, "the copies of layers")

    # -- the rank's thread -------------------------------------------------------------------------

    def share_memory(self) -> None:
        """Lets the target read this rank's copies, where it can. All ranks call it together."""
        what = "the memory of copies"
        rooms, address = None, ""
        with suppress(OSError):
            rooms = SharedRooms()
            address = rooms.address.model_dump_json()
        addresses = share_texts(self._everyone, address, what)
        if self._source is not None:
            with suppress(OSError, ValueError):
                found = Address.model_validate_json(addresses[self._source])
                self._source_rooms = OtherRooms(found)
        can_read = share_texts(self._everyone, "read" * (self._source_rooms is not None), what)
        if self._target is not None and can_read[self._target]:
            self._rooms = rooms

    def take(
        self,
        number: int,
        state: str,
        replica: int,
        layers: Iterable[tuple[int, nn.Module, dict[str, Tensor]]],
    ) -> None:
        """Begins a copy of own layers before a step. All ranks call it together.

        Parameters and moments may change once `wait_copied` returns, and all else once this does.
        """
        self.wait()
        self._forget()
        last = self.own.get(max(self.own, default=-1))
        copy, jobs = StepCopy(number, state), list[Callable[[], None]]()
        changed = dict[Key, list[bool]]()
        for index, module, optimizer_state in layers:
            manifest, tensors = described(index, module, optimizer_state)
            text, key = manifest.model_dump_json().encode(), (index, replica)
            before = None if last is None else last.layers.get(key)
            likes: Sequence[Tensor | None] = [None] * len(tensors)
            if before is not None and before.text == text:
                likes = before.tensors
            copied = copy.layers[key] = LayerCopy(text, [])
            flags = changed[key] = list[bool]()
            for record, tensor, like in zip(manifest.tensors, tensors, likes, strict=True):
                at = len(copied.tensors)
                is_lazy = tensor.device.type == "cpu" and record.stays_in_step
                copied.tensors.append(tensor)
                flags.append(True)

                def job(
                    copied: LayerCopy = copied,
                    flags: list[bool] = flags,
                    at: int = at,
                    tensor: Tensor = tensor,
                    like: Tensor | None = like,
                ) -> None:
                    copied.tensors[at], flags[at] = self._copy(tensor, like)

                if is_lazy:
                    jobs.append(job)
                else:
                    job()
        self.own[number] = copy
        self._copied.clear()
        self._channel.begin()
        self._channel.send_by(lambda: self._copy_and_send(copy, jobs, changed), self._peers)
        source = self._source
        if source is not None:
            self._channel.receive_by(lambda: self._receive(number, source), source)

    def wait_copied(self) -> None:
        """Waits until weights may change."""
        self._channel.wait_for(self._copied, self._peers)

    def wait(self) -> None:
        """Waits until the newest copies of this rank are sent and received."""
        self._channel.wait()

    def _forget(self) -> None:
        """Drops all copies but the newest, which is complete on every rank now."""
        for kept in (self.own, self.held):
            newest = max(kept, default=None)
            if newest is None:
                continue
            self._former.clear()
            if kept is self.held and self._source_rooms is not None:
                self.held = {newest: kept[newest]}
                continue
            if kept is self.own and self._rooms is not None:
                self._rooms.forget(newest)
            used = {id(t) for each in kept[newest].layers.values() for t in each.tensors}
            for number in [number for number in kept if number != newest]:
                for each in kept.pop(number).layers.values():
                    for tensor in each.tensors:
                        if id(tensor) not in used:
                            spare = self._spare.setdefault((tensor.dtype, tensor.shape), [])
                            spare.append(tensor)

    def close(self) -> None:
        """Ends the threads, and all waits of this rank in the generation if one is under way."""
        self._channel.close()

    def complete(self) -> dict[int, list[StepCopy]]:
        """Returns the copies that are here, those of earlier generations included, by number."""
        out = dict[int, list[StepCopy]]()
        for kept, rooms in self._all:
            for number, copy in list(kept.items()):  # threads add to it
                if copy.is_complete and (rooms is None or rooms.has(number)):
                    out.setdefault(number, []).append(copy)
        return out

    @property
    def _all(self) -> list[tuple[dict[int, StepCopy], OtherRooms | None]]:
        return [*self._former, (self.own, None), (self.held, self._source_rooms)]

    @property
    def nbytes(self) -> int:
        """Bytes that the copies take here. Memory of another process does not count."""
        tensors = {
            t.data_ptr(): t.nbytes
            for kept in ([self.own, self.held] if self._source_rooms is None else [self.own])
            for copy in list(kept.values())
            for each in copy.layers.values()
            for t in each.tensors
        }
        return sum(tensors.values())

    # -- the threads -------------------------------------------------------------------------------

    def _copy(self, tensor: Tensor, like: Tensor | None) -> tuple[Tensor, bool]:
        """Returns a copy on the host, and whether its bits are new. `like` is the one before."""
        host = tensor.detach()
        if like is not None and host.device.type == "cpu" and _same_bits(host, like):
            return like, False
        room = self._room(host.dtype, host.shape)
        room.copy_(host)
        return room, True

    def _room(self, dtype: torch.dtype, shape: torch.Size) -> Tensor:
        """Returns memory of a copy that was dropped, or new memory. Two threads call it."""
        with suppress(LookupError):
            return self._spare[dtype, shape].pop()
        if self._rooms is not None:
            return self._rooms.make(dtype, shape)
        return torch.empty(shape, dtype=dtype)

    def _copy_and_send(
        self, copy: StepCopy, jobs: Sequence[Callable[[], None]], changed: dict[Key, list[bool]]
    ) -> None:
        for job in jobs:
            self._channel.check_is_open()
            job()
        copy.is_complete = True
        self._copied.set()
        if self._target is not None:
            self._send(copy, changed, self._target)

    def _send(self, copy: StepCopy, changed: dict[Key, list[bool]], target: int) -> None:
        new = [
            tensor
            for key, each in copy.layers.items()
            for tensor, is_new in zip(each.tensors, changed[key], strict=True)
            if is_new
        ]
        rooms = self._rooms
        index = _Index(
            number=copy.number,
            layers=[(*key, each.text.decode(), changed[key]) for key, each in copy.layers.items()],
            places=None if rooms is None else [rooms.place_of(tensor) for tensor in new],
        )
        self._channel.put_text(index.model_dump_json().encode(), target)
        for tensor in new if rooms is None else ():
            self._channel.put_tensor(tensor, target)

    def _receive(self, number: int, source: int) -> None:
        index = _Index.model_validate_json(self._channel.get_text(source))
        assert index.number == number, "all ranks copy the same step"
        what = f"the copies of {self._everyone.describe_rank(source)}"
        last, copy = self.held.get(max(self.held, default=-1)), StepCopy(number)
        rooms, places = self._source_rooms, iter(index.places or ())
        assert (rooms is None) == (index.places is None), "both ends know how bytes travel"
        for layer, replica, manifest, changed in index.layers:
            key, data = (layer, replica), manifest.encode()
            before = None if last is None else last.layers.get(key)
            spec = _spec(data)
            if rooms is None:
                check_announced(bytes_of(spec), torch.device("cpu"), what)
            tensors = list[Tensor]()
            for at, (one, is_new) in enumerate(zip(spec, changed, strict=True)):
                if not is_new:
                    assert before is not None, "the copy before has the bits"
                    tensors.append(before.tensors[at])
                    continue
                if rooms is not None:
                    try:
                        room = rooms.tensor(Place(*next(places)), one[0], torch.Size(one[1]))
                    except OSError as error:  # a file that it has begun just now
                        raise RankDied(f"{what} cannot be read: {error.strerror}") from error
                    tensors.append(room)
                    continue
                room = self._room(one[0], torch.Size(one[1]))
                self._channel.get_tensor(room, source)
                tensors.append(room)
            copy.layers[key] = LayerCopy(data, tensors)
        copy.is_complete = True
        self.held[number] = copy


def _same_bits(tensor: Tensor, other: Tensor) -> bool:
    dtype = _BITS.get(tensor.element_size(), torch.uint8)
    flat = tensor.contiguous().view(-1), other.view(-1)
    return torch.equal(flat[0].view(dtype), flat[1].view(dtype))


def _spec(text: bytes) -> tuple[tuple[torch.dtype, tuple[int, ...]], ...]:
    records = Manifest.model_validate_json(text).tensors
    return tuple((DTYPES[r.dtype], tuple(r.shape)) for r in records)
