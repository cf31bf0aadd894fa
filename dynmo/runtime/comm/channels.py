"""Channels: one per stage boundary and direction.

A channel carries tuples of tensors in microbatch order. A header precedes the first message of a
channel. It tells dtypes and shapes (`headers.py`). From then on receives are posted ahead, so that
a message lands while the receiver computes. If shapes vary (`Program.varying`), every message has
its header, and the headers' leads are posted ahead. A tensor without elements is announced and not
sent.

    the rank's thread   F0 ───────── F1 ─────────
    outbox thread           └ send, wait  └ send,
    poster thread       post, post, post
    watcher thread             wait

    rank's thread   puts a message into an outbox: microseconds
    outbox          talks to gloo, and drops the tensors once the peer has them
    poster          keeps receives posted, for all inboxes
    watcher         waits for a message while the rank's thread has something else to do

On CPU gloo writes to the socket within the call that sends, and posting a receive tells the peer.
Threads of their own take both off the ops' path. On CUDA both only enqueue, on the current stream,
and are done in place. Only a thread that waits for a message learns from gloo that it has arrived,
hence the watcher. On CUDA an arrival can be queried. Headers travel by gloo there, too.
"""

from __future__ import annotations

import math
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dynmo.errors import DynmoError, RunError, WaitTimeout
from dynmo.runtime.comm.device_waits import POLL, WaitLimit
from dynmo.runtime.comm.headers import LEAD, Spec, decode, encode, on_wire, rest_of, spec_of
from dynmo.runtime.comm.world import World
from dynmo.schedule.lowering import Begun, Channel, Direction, Program, describe
from dynmo.schedule.memory import POSTED_AHEAD, posted

# Message tags: channels use 2 * boundary + direction. Everything else is above. Headers have tags
# of their own. Messages of one tag fill the receives posted for it in order. The receives of
# headers are posted ahead of those of the tensors.
TAG_HEADERS = 1 << 19
TAG_LINKS = 1 << 20
TAG_MIGRATE = 1 << 21
TAG_TRACE = 1 << 22
TAG_TIED = 1 << 23
TAG_PREFIX = 1 << 24
TAG_VERDICT = 1 << 25

# A posted receive on CUDA is a kernel that spins on the device until its message is there.
_POSTED_ON_CUDA = 1


def _ahead(world: World, depth: int, varying: bool) -> int:
    """Returns how many of the `depth` messages may land before they are asked for.

    Messages of varying shape land when they are taken.
    """
    return 0 if varying else min(_POSTED_ON_CUDA if world.enqueues else POSTED_AHEAD, depth - 1)


def _tag(channel: Channel) -> int:
    return 2 * channel.boundary + (channel.direction is Direction.GRADIENT)


def _key(channel: Channel) -> tuple[int, ...]:
    return (_tag(channel), channel.source, channel.target)


class Worker:
    """A thread that runs submitted work in order.

    Args:
        name: Name of the thread.
        threaded: Whether there is a thread. Otherwise `submit` runs the work in place.
    """

    def __init__(self, name: str, threaded: bool) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = (
            threading.Thread(target=self._serve, name=name, daemon=True) if threaded else None
        )
        self.error: DynmoError | None = None
        if self._thread is not None:
            self._thread.start()

    def submit(self, work: Callable[[], None]) -> None:
        if self._thread is None:
            work()
        else:
            self._queue.put(work)

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                if self.error is None:
                    work()
            except DynmoError as error:
                self.error = error
            except Exception as error:
                self.error = RunError(f"{self._name}: {type(error).__name__}: {error}")

    def close(self) -> None:
        """Ends the thread once all submitted work is done.

        The wait for it is short: after a failure the work may never be done.
        """
        self._queue.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=0.5)


Posted = tuple[tuple[Tensor, ...], list[dist.Work]]


class Inbox:
    """The receiving end of a channel.

    Args:
        world: World of this rank.
        channel: The channel.
        varying: Whether shapes vary, so that every message has a header.
        depth: Most messages under way.
        poster: Posts the receives.
        watcher: Waits for messages while the rank computes.
    """

    def __init__(
        self,
        world: World,
        channel: Channel,
        varying: bool,
        depth: int,
        poster: Worker,
        watcher: Worker,
    ) -> None:
        self._world, self.channel, self._varying, self._poster, self._watcher = (
            world,
            channel,
            varying,
            poster,
            watcher,
        )
        # A header that has landed does not mean that its message has.
        self._ahead = POSTED_AHEAD if varying else _ahead(world, depth, varying)
        self._depth = depth
        self._spec: Spec | None = None
        self._unposted = self._open = self._messages = 0
        self._posted: queue.SimpleQueue[Posted] = queue.SimpleQueue()
        # The next message, once `arrived` has asked for it. On CPU the event is set when the
        # message is here or will not come.
        self._due: Posted | None = None
        self._here: threading.Event | None = None

    def open(self, messages: int) -> None:
        """Begins a step.

        Args:
            messages: Number of messages that the step will bring.
        """
        assert not self._open, "messages of an earlier step were not taken"
        self._unposted = self._messages = messages
        self._post(self._window())

    def rewind(self, sent: int, taken: int) -> None:
        """Begins the step again. As many messages as were sent will come again.

        Takes and drops the messages that were sent and not yet taken.

        Args:
            sent: Number of messages that the peer has sent.
            taken: Number of messages that were taken here.
        """
        for microbatch in range(taken, sent):
            self.take(microbatch)
        self._unposted += sent
        self._post(self._window())

    def _window(self) -> int:
        """Returns how many receives to keep posted.

        All of a step's if nothing limits them and they are small. Then none is posted later.
        """
        if self._spec is None or self._varying or self._world.enqueues:
            return self._ahead
        return posted(
            self._messages,
            sum(dtype.itemsize * math.prod(shape) for dtype, shape in self._spec),
            self._depth,
        )

    def _post(self, count: int) -> None:
        """Posts receives until `count` are open."""
        if self._spec is None and not self._varying:
            return
        while self._unposted and self._open < count:
            self._unposted -= 1
            self._open += 1
            self._poster.submit(self._post_one)

    def _post_one(self) -> None:
        if self._varying:
            buffers: tuple[Tensor, ...] = (torch.zeros(LEAD, dtype=torch.int64),)
        else:
            assert self._spec is not None
            buffers = tuple(
                torch.empty(shape, dtype=dtype, device=self._world.device)
                for dtype, shape in self._spec
            )
        self._posted.put((buffers, self._receive(buffers, header=self._varying)))

    def _receive(self, buffers: tuple[Tensor, ...], header: bool = False) -> list[dist.Work]:
        channel = self.channel
        tag = _tag(channel) + header * TAG_HEADERS
        return [
            self._world.receive(on_wire(b), channel.source, tag, _key(channel))
            for b in buffers
            if b.numel()
        ]

    def _wait(self, works: list[dist.Work], microbatch: int) -> None:
        for work in works:
            self._world.wait(
                work,
                self.channel.source,
                f"the {self.channel.direction} of microbatch {microbatch}",
            )

    def _next_posted(self, timeout: float) -> Posted:
        """Returns the next posted receive.

        Raises queue.Empty if the poster is late or has failed.
        """
        self._post(1)
        end = time.perf_counter() + timeout
        while True:
            try:
                posted = self._posted.get(timeout=min(0.05, timeout))
                break
            except queue.Empty:
                if self._poster.error is not None or time.perf_counter() >= end:
                    raise
        self._open -= 1
        # Post before the wait, so that the work is done while the message is on its way.
        self._post(self._window())
        return posted

    def _land(self, microbatch: int) -> tuple[Tensor, ...]:
        """Returns the buffers of the next posted receive, once they are filled."""
        try:
            buffers, works = self._due or self._next_posted(self._world.timeout)
        except queue.Empty:
            raise self._poster.error or self._late("its own receives") from None
        here, self._due, self._here = self._here, None, None
        if here is None:
            self._wait(works, microbatch)
        # The watcher's own wait has a shorter limit and a better message, so it fails first.
        elif not here.wait(self._world.timeout + 5) or self._watcher.error is not None:
            raise self._watcher.error or self._late(
                f"its own watcher of the {self.channel.direction} of microbatch {microbatch}"
            )
        return buffers

    def _late(self, what: str) -> WaitTimeout:
        me = self._world.rank
        return WaitTimeout(
            f"{self._world.describe_rank(me)} waited {self._world.timeout:g} s for {what}",
            [self._world.global_rank(me)],
        )

    def arrived(self, microbatch: int, timeout: float) -> bool:
        """Returns whether the next message is here, or comes within `timeout` seconds.

        Returns True if there is no telling: for the first message of a channel, whose shapes are
        not known. For a channel of varying shapes, returns whether the header is here. On CUDA the
        timeout counts from when the device has nothing left to do: until then nobody waits.

        Args:
            microbatch: Microbatch of the message.
            timeout: Seconds to wait.
        """
        if self._spec is None and not self._varying:
            return True
        if self._due is None:
            try:
                self._due = self._next_posted(timeout)
            except queue.Empty:
                return False
            if not self._world.enqueues or self._varying:
                self._here = threading.Event()
                self._watcher.submit(partial(self._watch, self._due[1], microbatch, self._here))
        if self._here is not None:
            return self._here.wait(timeout)
        return _filled(self._world, self._due[1], timeout)

    def _watch(self, works: list[dist.Work], microbatch: int, here: threading.Event) -> None:
        try:
            self._wait(works, microbatch)
        except DynmoError as error:
            self._watcher.error = error  # before the event, so that the waiting thread sees it
            raise
        finally:
            works.clear()  # or this thread would keep the message until the next
            here.set()

    def take(self, microbatch: int) -> tuple[Tensor, ...]:
        """Returns the next message, which is the one of `microbatch`."""
        if self._varying:
            (lead,) = self._land(microbatch)
            buffers = tuple(
                torch.empty(shape, dtype=dtype, device=self._world.device)
                for dtype, shape in self._read(lead, microbatch)
            )
            self._wait(self._receive(buffers), microbatch)
        else:
            if self._spec is None:
                lead = torch.zeros(LEAD, dtype=torch.int64)
                self._wait(self._receive((lead,), header=True), microbatch)
                self._spec = self._read(lead, microbatch)
            buffers = self._land(microbatch)
        return buffers

    def _read(self, lead: Tensor, microbatch: int) -> Spec:
        """Returns the spec that the header announces.

        The rest of the header, if any, comes before the message's tensors, in one sequence with
        them.
        """
        what = describe(self.channel)
        rest = rest_of(lead, what)
        if rest is None:
            return decode((lead,), self._world.device, what)
        self._wait(self._receive((rest,)), microbatch)
        return decode((lead, rest), self._world.device, what)


def _filled(world: World, works: list[dist.Work], seconds: float) -> bool:
    """Returns whether the receives are filled within `seconds` of an idle stream.

    The seconds count from when the stream has run dry. It only asks: nothing is held up on the
    device.
    """
    timeout = WaitLimit(world.device, seconds)
    while not all(work.is_completed() for work in works):
        if timeout.over():
            return False
        world.look()
        time.sleep(POLL)
    return True


class Enqueued(NamedTuple):
    """CUDA: a message under way.

    Its header, if it has one, is gloo's. gloo never reports a work as completed before the wait.
    """

    header: list[dist.Work]
    works: list[dist.Work]
    tensors: list[Tensor]


class Outbox:
    """The sending end of a channel.

    It holds a message's tensors until the peer has them.

    Args:
        world: World of this rank.
        channel: The channel.
        varying: Whether shapes vary, so that every message has a header.
        depth: Most messages under way.
    """

    def __init__(self, world: World, channel: Channel, varying: bool, depth: int) -> None:
        self._world, self.channel, self._varying = world, channel, varying
        self._spec: Spec | None = None
        threaded = not world.enqueues
        self.worker = Worker(f"outbox {channel.source}-{channel.target}", threaded)
        # CUDA: waiting for a send in place would hold up the compute stream.
        self._enqueued: deque[Enqueued] = deque()
        # Number of messages that may be here and not yet with the peer. The rest of the depth is
        # posted by the peer.
        self._depth = depth - _ahead(world, depth, varying)
        self._room = threading.BoundedSemaphore(self._depth)
        self._threaded = threaded

    def put(self, microbatch: int, tensors: tuple[Tensor, ...]) -> None:
        """Sends a message. Waits if the channel is full.

        Args:
            microbatch: Microbatch of the message.
            tensors: The message. They must not change until the peer has them.

        Raises:
            RunError: The shapes changed, and the channel is not one of varying shapes.
            WaitTimeout: The peer did not make room in time.
        """
        spec = spec_of(tensors)
        header: tuple[Tensor, ...] = ()
        if self._varying or self._spec is None:
            header = encode(spec)
            self._spec = spec
        elif spec != self._spec:
            raise RunError(
                f"{describe(self.channel)} changed shape from {self._spec} to {spec} at microbatch "
                f"{microbatch}; "
                "pad the tensors, or give the layer that hands them on the attribute "
                "varying_shapes = True"
            )
        self._acquire(microbatch)
        self.worker.submit(lambda: self._send(microbatch, header, tensors))

    def _send(
        self, microbatch: int, header: tuple[Tensor, ...], tensors: tuple[Tensor, ...]
    ) -> None:
        channel, tag, key = self.channel, _tag(self.channel), _key(self.channel)
        parts = [
            on_wire(tensor if tensor.is_contiguous() else tensor.detach().contiguous())
            for tensor in tensors
        ]
        try:
            head = [
                self._world.send(lead, channel.target, tag + TAG_HEADERS, key)
                for lead in header[:1]
            ]
            head += [self._world.send(rest, channel.target, tag, key) for rest in header[1:]]
            works = [
                self._world.send(part, channel.target, tag, key) for part in parts if part.numel()
            ]
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
        """CUDA: frees the places of messages that the peer has.

        Returns whether there were any.
        """
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
        """Waits for a place in the channel's depth.

        The worker's own wait has a shorter limit and a better message, so it fails first.
        """
        taken = False
        if self.worker.error is None:
            taken = (
                self._room.acquire(timeout=self._world.timeout + 5)
                if self._threaded
                else self._acquire_enqueued()
            )
        if not taken or self.worker.error is not None:
            raise self.worker.error or WaitTimeout(
                f"{self._world.describe_rank(self._world.rank)} waited {self._world.timeout:g} s "
                f"for {self._world.describe_rank(self.channel.target)}: "
                f"room to send the {self.channel.direction} of microbatch {microbatch}",
                [self._world.global_rank(self.channel.target)],
            )

    def _acquire_enqueued(self) -> bool:
        """CUDA: waits for a place by asking again and again.

        Only this thread can find out that a send is done. The host may be a step ahead of the
        device. Time therefore counts only while the device is idle and nothing comes through.
        """
        timeout = WaitLimit(self._world.device, self._world.timeout)
        while not self._room.acquire(blocking=False):
            if self._release_done():
                timeout.renew()
            elif timeout.over():
                return False
            else:
                self._world.look()
                time.sleep(POLL)
        return True

    def flush(self) -> None:
        """Waits until the peer has taken every message."""
        for _ in range(self._depth):
            self._acquire(-1)
        for _ in range(self._depth):
            self._room.release()


class Transport:
    """This rank's ends of the channels of one set of programs.

    All ranks must make it at the same time, from the same programs.

    Args:
        world: World of this rank.
        programs: Program of each rank.
    """

    def __init__(self, world: World, programs: tuple[Program, ...]) -> None:
        own = programs[world.rank]
        world.open_channels(sorted({_key(c) for p in programs for c in p.depth}))
        self._world, self._messages = world, own.microbatches
        self._poster = Worker("poster", bool(own.incoming) and not world.enqueues)
        self._watcher = Worker(
            "watcher", any(c in own.varying or not world.enqueues for c in own.incoming)
        )
        self._inboxes = {
            c: Inbox(world, c, c in own.varying, own.depth[c], self._poster, self._watcher)
            for c in own.incoming
        }
        self._outboxes = {c: Outbox(world, c, c in own.varying, own.depth[c]) for c in own.outgoing}
        # The threads end with the transport, even if nobody closes it.
        workers = [
            self._poster,
            self._watcher,
            *(outbox.worker for outbox in self._outboxes.values()),
        ]
        self._finish = weakref.finalize(self, _end, workers)
        world.channels.add(self)

    def open(self) -> None:
        for inbox in self._inboxes.values():
            inbox.open(self._messages)

    def rewind(self, begun: tuple[Begun, ...]) -> None:
        """Begins a step again, on all ranks.

        Posted receives stay. The messages that are sent anew fill them.

        Args:
            begun: Channel, messages sent and messages taken, for each channel in use.
        """
        for channel, sent, taken in begun:
            self._inboxes[channel].rewind(sent, taken)

    def take(self, channel: Channel, microbatch: int) -> tuple[Tensor, ...]:
        """Returns the next message of a channel.

        Args:
            channel: The channel.
            microbatch: Microbatch of the message.
        """
        return self._inboxes[channel].take(microbatch)

    def arrived(self, channel: Channel, microbatch: int, timeout: float) -> bool:
        """Returns whether `take` would have the message, now or within `timeout` seconds.

        Args:
            channel: The channel.
            microbatch: Microbatch of the message.
            timeout: Seconds to wait.
        """
        return self._inboxes[channel].arrived(microbatch, timeout)

    def put(self, channel: Channel, microbatch: int, tensors: tuple[Tensor, ...]) -> None:
        """Sends a message over a channel.

        Args:
            channel: The channel.
            microbatch: Microbatch of the message.
            tensors: The message. They must not change until the peer has them.
        """
        self._outboxes[channel].put(microbatch, tensors)

    def flush(self) -> None:
        for outbox in self._outboxes.values():
            outbox.flush()
        self._world.settle()

    def close(self) -> None:
        """Ends the threads. Nothing may be under way."""
        self._finish()


def _end(workers: list[Worker]) -> None:
    for worker in workers:
        worker.close()
