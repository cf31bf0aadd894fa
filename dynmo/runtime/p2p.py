"""Channels: one per stage boundary and direction, carrying tuples of tensors in microbatch order.

The first message of a channel is preceded by a fixed-size header that tells dtypes and shapes; from then on receives are posted ahead, so
that a message lands while the receiver computes. Where shapes vary (`varying`), every message has its header, and the headers are
posted ahead. Sends never block compute: they hold their tensors until the peer has taken them, up to the channel's depth.
"""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from dynmo.errors import RunError
from dynmo.runtime.world import World
from dynmo.schedule.lower import Channel, Direction, Program, describe

# Message tags: channels use 2 * boundary + direction; everything else is above.
TAG_LINKS = 1 << 20
TAG_MIGRATE = 1 << 21
TAG_TRACE = 1 << 22

_HEADER = 64  # int64 numbers: count, then per tensor dtype, dimensions, sizes
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool, torch.int8)
_AHEAD = 4  # receives posted before they are asked for; a message that has landed costs no wait

Spec = tuple[tuple[torch.dtype, tuple[int, ...]], ...]


def encode(spec: Spec) -> Tensor:
    numbers = [len(spec)]
    for dtype, shape in spec:
        numbers += [_DTYPES.index(dtype), len(shape), *shape]
    if len(numbers) > _HEADER:
        raise RunError(f"a message of {len(spec)} tensors with so many dimensions does not fit the channel's header")
    return torch.tensor(numbers + [0] * (_HEADER - len(numbers)), dtype=torch.int64)


def decode(header: Tensor) -> Spec:
    numbers = header.tolist()
    spec: list[tuple[torch.dtype, tuple[int, ...]]] = []
    at = 1
    for _ in range(numbers[0]):
        dtype, dimensions = _DTYPES[numbers[at]], numbers[at + 1]
        spec.append((dtype, tuple(numbers[at + 2 : at + 2 + dimensions])))
        at += 2 + dimensions
    return tuple(spec)


def spec_of(tensors: tuple[Tensor, ...]) -> Spec:
    return tuple((t.dtype, tuple(t.shape)) for t in tensors)


def _tag(channel: Channel) -> int:
    return 2 * channel.boundary + (channel.direction is Direction.GRADIENT)


def _key(channel: Channel) -> tuple[int, ...]:
    return (_tag(channel), channel.source, channel.target)


class Inbox:
    """The receiving end of a channel."""

    def __init__(self, world: World, channel: Channel, varying: bool) -> None:
        self._world, self.channel, self._varying = world, channel, varying
        self._spec: Spec | None = None
        self._unposted = 0
        self._posted: deque[tuple[tuple[Tensor, ...], list[dist.Work]]] = deque()

    def open(self, messages: int) -> None:
        """The step that starts will bring so many messages."""
        assert not self._posted, "messages of an earlier step were not taken"
        self._unposted = messages
        self._post()

    def _post(self) -> None:
        if self._spec is None and not self._varying:
            return
        while self._unposted and len(self._posted) < _AHEAD:
            self._unposted -= 1
            if self._varying:
                buffers: tuple[Tensor, ...] = (torch.zeros(_HEADER, dtype=torch.int64),)
            else:
                assert self._spec is not None
                buffers = tuple(torch.empty(shape, dtype=dtype, device=self._world.device) for dtype, shape in self._spec)
            self._posted.append((buffers, self._receive(buffers)))

    def _receive(self, buffers: tuple[Tensor, ...]) -> list[dist.Work]:
        channel = self.channel
        return [self._world.receive(b, channel.source, _tag(channel), _key(channel)) for b in buffers]

    def _wait(self, works: list[dist.Work], microbatch: int) -> None:
        for work in works:
            self._world.wait(work, self.channel.source, f"the {self.channel.direction} of microbatch {microbatch}")

    def take(self, microbatch: int) -> tuple[Tensor, ...]:
        """The next message, which is the one of `microbatch`."""
        if self._varying:
            (header,), works = self._posted.popleft()
            self._wait(works, microbatch)
            buffers = tuple(torch.empty(shape, dtype=dtype, device=self._world.device) for dtype, shape in decode(header))
            self._wait(self._receive(buffers), microbatch)
        elif self._spec is None:
            header = torch.zeros(_HEADER, dtype=torch.int64)
            self._wait(self._receive((header,)), microbatch)
            self._spec = decode(header)
            self._post()
            buffers, works = self._posted.popleft()
            self._wait(works, microbatch)
        else:
            buffers, works = self._posted.popleft()
            self._wait(works, microbatch)
        self._post()
        return buffers


class Outbox:
    """The sending end of a channel."""

    def __init__(self, world: World, channel: Channel, varying: bool, depth: int) -> None:
        self._world, self.channel, self._varying = world, channel, varying
        self._depth = max(1, depth - _AHEAD)  # what the receiver has posted ahead counts against the depth too
        self._spec: Spec | None = None
        self._flying: deque[tuple[dist.Work, Tensor, int]] = deque()

    def put(self, microbatch: int, tensors: tuple[Tensor, ...]) -> None:
        spec = spec_of(tensors)
        if self._varying or self._spec is None:
            self._send(encode(spec), microbatch)
            self._spec = spec
        elif spec != self._spec:
            raise RunError(
                f"{describe(self.channel)} changed shape from {self._spec} to {spec} at microbatch {microbatch}; "
                "a model whose messages vary must say so (varying)"
            )
        for tensor in tensors:
            self._send(tensor.detach().contiguous(), microbatch)
        while self._flying and self._flying[0][0].is_completed():
            self._flying.popleft()
        while len(self._flying) > self._depth * (len(spec) + self._varying):
            self._retire()

    def _send(self, tensor: Tensor, microbatch: int) -> None:
        channel = self.channel
        self._flying.append((self._world.send(tensor, channel.target, _tag(channel), _key(channel)), tensor, microbatch))

    def _retire(self) -> None:
        work, _, microbatch = self._flying.popleft()
        self._world.wait(work, self.channel.target, f"room to send the {self.channel.direction} of microbatch {microbatch}")

    def flush(self) -> None:
        """Waits until the peer has taken everything."""
        while self._flying:
            self._retire()


class Transport:
    """This rank's ends of the channels of one set of programs. All ranks must make it at the same time, from the same programs."""

    def __init__(self, world: World, programs: tuple[Program, ...], varying: bool = False) -> None:
        own = programs[world.rank]
        world.open_channels(sorted({_key(c) for p in programs for c in p.depth}))
        self._messages = own.microbatches
        self._inboxes = {c: Inbox(world, c, varying) for c in own.incoming}
        self._outboxes = {c: Outbox(world, c, varying, own.depth[c]) for c in own.outgoing}

    def open(self) -> None:
        for inbox in self._inboxes.values():
            inbox.open(self._messages)

    def take(self, channel: Channel, microbatch: int) -> tuple[Tensor, ...]:
        return self._inboxes[channel].take(microbatch)

    def put(self, channel: Channel, microbatch: int, tensors: tuple[Tensor, ...]) -> None:
        self._outboxes[channel].put(microbatch, tensors)

    def flush(self) -> None:
        for outbox in self._outboxes.values():
            outbox.flush()
