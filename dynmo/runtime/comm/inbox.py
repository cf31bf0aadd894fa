"""The receiving end of a channel (`channels.py`)."""

from __future__ import annotations

import queue

import torch
import torch.distributed as dist
from torch import Tensor

from dynmo.runtime.comm.headers import (
    LEAD,
    TAG_HEADERS,
    Announcement,
    Spec,
    bytes_of,
    decode,
    mark_alias,
    on_wire,
    rest_of,
    room_for,
    tag_of,
)
from dynmo.runtime.comm.rank_group import RankGroup
from dynmo.runtime.comm.worker import Worker
from dynmo.schedule.lowering import Channel, describe
from dynmo.schedule.memory import POSTED_AHEAD, posted

# A posted receive on CUDA is a kernel that spins on the device until its message is there.
_POSTED_ON_CUDA = 1


def posted_ahead(world: RankGroup, depth: int, varying: bool) -> int:
    """Returns how many messages may land before they are taken."""
    return 0 if varying else min(_POSTED_ON_CUDA if world.enqueues else POSTED_AHEAD, depth - 1)


def posted_at_start(world: RankGroup, messages: int, spec: Spec | None, depth: int) -> int:
    """Returns how many receives of one shape are posted before a step's first message."""
    if spec is None:
        return 0
    if world.enqueues:
        return min(messages, posted_ahead(world, depth, varying=False))
    return min(messages, posted(messages, bytes_of(spec), depth))


Posted = tuple[tuple[Tensor, ...], list[dist.Work]]


class Inbox:
    """The receiving end of a channel. It keeps receives posted ahead of the ops."""

    def __init__(
        self,
        world: RankGroup,
        channel: Channel,
        varying: bool,
        depth: int,
        poster: Worker,
    ) -> None:
        self._world = world
        self.channel = channel
        self._varying = varying
        # Whether each message of this step has a header, and whether one said that the batch is
        # ragged.
        self._headed, self.ragged = varying, False
        self._poster = poster
        self._depth = depth
        self._spec: Spec | None = None
        self._announced: Announcement | None = None
        self._unposted = self._open = self._messages = 0
        # The next receive is that of the header before the first message of the step. The receives
        # of messages are posted behind it for the shape of the step before.
        self._awaits_header = False
        self._posted: queue.SimpleQueue[Posted] = queue.SimpleQueue()

    def open(self, messages: int) -> None:
        assert not self._open, "messages of an earlier step were not taken"
        self._unposted = self._messages = messages
        self._headed, self.ragged, self._awaits_header = self._varying, False, not self._varying
        if self._awaits_header:
            self._poster.submit(self._post_header)
        self._post(self._window())

    def rewind(self, sent: int, taken: int) -> None:
        """Begins the step again, without the messages that were sent and not yet taken."""
        for microbatch in range(taken, sent):
            self.take(microbatch)
        self._unposted += sent
        self._post(self._window())

    def _window(self) -> int:
        """Returns how many receives to keep posted: all of a step's if they are small."""
        if self._headed:
            return POSTED_AHEAD
        return posted_at_start(self._world, self._messages, self._spec, self._depth)

    def _post(self, count: int) -> None:
        if self._spec is None and not self._headed:
            return
        while self._unposted and self._open < count:
            self._unposted -= 1
            self._open += 1
            self._poster.submit(self._post_header if self._headed else self._post_one)

    def _post_one(self) -> None:
        assert self._spec is not None
        buffers = room_for(self._spec, self._world.device)
        self._posted.put((buffers, self._receive(buffers)))

    def _post_header(self) -> None:
        lead = (torch.zeros(LEAD, dtype=torch.int64),)
        self._posted.put((lead, self._receive(lead, header=True)))

    def _receive(self, buffers: tuple[Tensor, ...], header: bool = False) -> list[dist.Work]:
        channel = self.channel
        tag = tag_of(channel) + header * TAG_HEADERS
        return [self._world.receive(on_wire(b), channel.source, tag) for b in buffers if b.numel()]

    def _wait(self, works: list[dist.Work], microbatch: int) -> None:
        for work in works:
            self._world.wait(
                work,
                self.channel.source,
                f"the {self.channel.direction} of microbatch {microbatch}",
            )

    def _next_posted(self) -> Posted:
        if not self._awaits_header:
            self._post(1)
        try:
            posted = self._posted.get_nowait()
        except queue.Empty:
            posted = self._await_posted()
        if self._awaits_header:
            return posted
        self._open -= 1
        # Post before the wait, so that the work is done while the message is on its way.
        self._post(self._window())
        return posted

    def _await_posted(self) -> Posted:
        what = f"room to post receives of the {self.channel.direction}"
        with self._world.waiting([self.channel.source], what) as wait:
            while True:
                try:
                    return self._posted.get(timeout=0.05)
                except queue.Empty:
                    if self._poster.error is not None:
                        raise self._poster.error from None
                    if wait.is_over:
                        raise self._world.late([self.channel.source], what, wait) from None

    def _land(self, microbatch: int) -> tuple[Tensor, ...]:
        buffers, works = self._next_posted()
        self._wait(works, microbatch)
        return buffers

    def take(self, microbatch: int) -> tuple[Tensor, ...]:
        """Returns the next message, which is the one of `microbatch`."""
        if self._headed:
            (lead,) = self._land(microbatch)
            return self._take_announced(self._read(lead, microbatch, first=False), microbatch)
        if self._awaits_header:
            (lead,) = self._land(microbatch)
            self._awaits_header = False
            announced = self._announced = self._read(lead, microbatch, first=True)
            if self.ragged:
                self._drop_posted(microbatch)
                self._spec, self._headed = None, True
                self._unposted -= 1
                self._post(self._window())
                return self._take_announced(announced, microbatch)
            self._expect(announced.spec, microbatch)
        assert self._announced is not None
        return _marked(self._land(microbatch), self._announced)

    def _take_announced(self, announced: Announcement, microbatch: int) -> tuple[Tensor, ...]:
        buffers = room_for(announced.spec, self._world.device)
        self._wait(self._receive(buffers), microbatch)
        return _marked(buffers, announced)

    def _expect(self, spec: Spec, microbatch: int) -> None:
        """Posts receives for this step's shape."""
        if spec != self._spec:
            self._drop_posted(microbatch)
            self._spec = spec
            self._post(self._window())

    def _drop_posted(self, microbatch: int) -> None:
        """Takes the receives of another shape, which the sender fills."""
        posted, unposted, self._unposted = self._open, self._unposted, 0
        for _ in range(posted):
            self._land(microbatch)
        self._unposted = posted + unposted

    def _read(self, lead: Tensor, microbatch: int, first: bool) -> Announcement:
        """Returns what the header announces.

        The rest of a header comes in one sequence with the tensors if headers are posted ahead.
        """
        what = describe(self.channel)
        rest = rest_of(lead, what)
        if rest is not None:
            self._wait(self._receive((rest,), header=first), microbatch)
        announced = decode((lead,) if rest is None else (lead, rest), self._world.device, what)
        self.ragged = announced.ragged
        return announced


def _marked(tensors: tuple[Tensor, ...], announced: Announcement) -> tuple[Tensor, ...]:
    """Returns the tensors. Those that get a gradient require one."""
    for tensor, requires in zip(tensors, announced.differentiable, strict=True):
        tensor.requires_grad_(requires)
    for tensor, alias in zip(tensors, announced.aliases, strict=False):
        if alias:
            mark_alias(tensor)
    return tensors
