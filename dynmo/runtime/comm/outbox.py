"""The sending end of a channel (`channels.py`)."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import ExitStack
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dynmo.errors import DynmoError, RunError
from dynmo.runtime.comm.device_waits import POLL, DryTime
from dynmo.runtime.comm.headers import (
    TAG_HEADERS,
    Announcement,
    Spec,
    encode,
    is_alias,
    on_wire,
    spec_of,
    tag_of,
)
from dynmo.runtime.comm.heartbeat import Wait
from dynmo.runtime.comm.inbox import posted_ahead, posted_at_start
from dynmo.runtime.comm.rank_group import RankGroup
from dynmo.runtime.comm.worker import Worker
from dynmo.schedule.lowering import Channel, describe


class Enqueued(NamedTuple):
    """CUDA: a message under way. gloo reports no header as completed before the wait."""

    header: list[dist.Work]
    works: list[dist.Work]
    tensors: list[Tensor]


class Outbox:
    """The sending end of a channel.

    It bounds the messages that are under way, and holds their tensors until the peer has them.
    """

    def __init__(self, world: RankGroup, channel: Channel, varying: bool, depth: int) -> None:
        self._world, self.channel, self._varying = world, channel, varying
        # Whether each message of this step has a header.
        self._headed = varying
        self._spec: Spec | None = None
        self._is_first, self._messages = True, 0
        threaded = not world.enqueues
        self.worker = Worker(f"outbox {channel.source}-{channel.target}", threaded)
        # CUDA: waiting for a send in place would hold up the compute stream.
        self._enqueued: deque[Enqueued] = deque()
        self._whole_depth, self._threaded = depth, threaded
        self._limit()

    def open(self, messages: int) -> None:
        self._is_first, self._messages, self._headed = True, messages, self._varying

    def _limit(self) -> None:
        """Sets how many messages may be here and not yet with the peer, while none is here.

        The rest of the depth is posted by the peer, unless each message has a header.
        """
        ahead = posted_ahead(self._world, self._whole_depth, self._headed)
        self._depth = self._whole_depth - ahead
        self._room = threading.BoundedSemaphore(self._depth)

    def put(self, microbatch: int, tensors: tuple[Tensor, ...], ragged: bool = False) -> None:
        """Sends a message. Waits if the channel is full.

        Args:
            ragged: Whether the microbatches of this step have shapes of their own.
        """
        spec = spec_of(tensors)
        header: tuple[Tensor, ...] = ()
        fillers: tuple[Tensor, ...] = ()
        behind = tag_of(self.channel) + TAG_HEADERS * (self._is_first and not self._varying)
        if self._headed or self._is_first:
            differentiable = tuple(t.requires_grad for t in tensors)
            aliases = tuple(map(is_alias, tensors))
            header = encode(Announcement(spec, differentiable, ragged, aliases))
            if self._is_first and not self._varying:
                if ragged or spec != self._spec:
                    fillers = self._fillers()
                self._headed = ragged
                self._limit()
            self._spec, self._is_first = None if self._headed else spec, False
        elif spec != self._spec:
            raise RunError(
                f"{describe(self.channel)} changed shape from {self._spec} to {spec} at microbatch "
                f"{microbatch}; "
                "pad the tensors, or give the layer that hands them on the attribute "
                "varying_shapes = True"
            )
        self._acquire(microbatch)
        self.worker.submit(lambda: self._send(microbatch, header, behind, (*fillers, *tensors)))

    def _fillers(self) -> tuple[Tensor, ...]:
        """Returns tensors for receives that the peer has posted for another shape."""
        count = posted_at_start(self._world, self._messages, self._spec, self._whole_depth)
        return count * tuple(
            torch.zeros(shape, dtype=dtype, device=self._world.device)
            for dtype, shape in self._spec or ()
        )

    def _send(
        self,
        microbatch: int,
        header: tuple[Tensor, ...],
        behind: int,
        tensors: tuple[Tensor, ...],
    ) -> None:
        channel, tag = self.channel, tag_of(self.channel)
        parts = [
            on_wire(tensor if tensor.is_contiguous() else tensor.detach().contiguous())
            for tensor in tensors
        ]
        try:
            head = [
                self._world.send(numbers, channel.target, at)
                for numbers, at in zip(header, (tag + TAG_HEADERS, behind), strict=False)
            ]
            works = [self._world.send(part, channel.target, tag) for part in parts if part.numel()]
            if not self._threaded:
                self._enqueued.append(Enqueued(head, works, [*parts, *header]))
                self._release_done()
                return
            for work in (*head, *works):
                self._world.wait(
                    work,
                    channel.target,
                    f"room to send the {channel.direction} of microbatch {microbatch}",
                )
        except DynmoError as error:
            self.worker.error = error  # before the place is free, so that who takes it sees it
            self._room.release()
            raise
        self._room.release()

    def _release_done(self) -> bool:
        """CUDA: frees the places of messages that the peer has, if there are any."""
        before = len(self._enqueued)
        while self._enqueued and all(work.is_completed() for work in self._enqueued[0].works):
            # The peer read the header before it could receive the message behind it.
            for header in self._enqueued.popleft().header:
                self._world.wait(
                    header,
                    self.channel.target,
                    f"the header of the {self.channel.direction} to be read",
                )
            self._room.release()
        return len(self._enqueued) < before

    def _acquire(self, microbatch: int) -> None:
        """Waits for a place. The worker's own wait is shorter and has a better message."""
        if self._room.acquire(blocking=False) and self.worker.error is None:
            return
        what = f"room to send the {self.channel.direction} of microbatch {microbatch}"
        if not self._threaded:
            self._acquire_enqueued(what)
            return
        with self._world.waiting([self.channel.target], what) as wait:
            while self.worker.error is None and not self._room.acquire(timeout=0.5):
                if wait.is_over:
                    raise self.worker.error or self._world.late([self.channel.target], what, wait)
        if self.worker.error is not None:
            raise self.worker.error

    def _acquire_enqueued(self, what: str) -> None:
        """CUDA: waits for a place. Only this thread can find out that a send is done.

        The host may be a step ahead of the device. Time counts only while the device is idle.
        """
        peers, dry = [self.channel.target], DryTime(self._world.device)
        with ExitStack() as waiting:
            wait: Wait | None = None
            while not self._room.acquire(blocking=False):
                if self._release_done():
                    dry.renew()
                    waiting.close()
                    wait = None
                    continue
                if wait is None and dry.seconds > 0:
                    wait = waiting.enter_context(self._world.waiting(peers, what))
                has_limit = self._world.everyone.heartbeat is None
                late = dry.seconds >= self._world.timeout if has_limit else wait and wait.is_over
                if late:
                    raise self._world.late(peers, what, wait)
                self._world.look()
                time.sleep(POLL)
        self._world.look_away()

    def flush(self) -> None:
        """Waits until the peer has taken every message."""
        for _ in range(self._depth):
            self._acquire(-1)
        for _ in range(self._depth):
            self._room.release()
