"""Channels: one per stage boundary and direction.

A channel carries tuples of tensors in microbatch order. A header precedes the first message of a
step. It tells dtypes and shapes (`headers.py`). Receives of a step are posted ahead, so that a
message lands while the receiver computes. They have the shapes of the step before. If the header
tells others, the sender fills those receives with zeros, and the receiver posts new ones. A tensor
without elements is announced and not sent.

Every message has its header if a layer's outputs vary (`Program.varying`), or if the batch is
ragged: its microbatches have shapes of their own. The first header of the step says so. The rank of
the first stage knows it from the batch, and each further rank from the first header that it takes.
The headers' leads are then posted ahead.

    the rank's thread   F0 ───────── F1 ─────────
    outbox thread           └ send, wait  └ send,
    poster thread       post, post, post

    rank's thread   puts a message into an outbox: microseconds
    outbox          talks to gloo, and drops the tensors once the peer has them
    poster          keeps receives posted, for all inboxes

On CPU gloo writes to the socket within the call that sends, and posting a receive tells the peer.
Threads of their own take both off the ops' path. On CUDA both only enqueue, on the current stream,
and are done in place. Headers travel by gloo there, too.
"""

from __future__ import annotations

import weakref

from torch import Tensor

from dynmo.runtime.comm.headers import tag_of
from dynmo.runtime.comm.inbox import Inbox
from dynmo.runtime.comm.outbox import Outbox
from dynmo.runtime.comm.rank_group import RankGroup
from dynmo.runtime.comm.worker import Worker
from dynmo.schedule.lowering import Begun, Channel, Program


class Transport:
    """This rank's ends of the channels of some programs. All ranks make it at once.

    Attributes:
        ragged: Whether the batch of this step is known to have microbatches of several shapes.
    """

    def __init__(self, world: RankGroup, programs: tuple[Program, ...]) -> None:
        program = programs[world.rank]
        world.open_channels(
            sorted({(tag_of(c), c.source, c.target) for p in programs for c in p.depth})
        )
        self._world, self._messages, self.ragged = world, program.microbatches, False
        self._poster = Worker("poster", bool(program.incoming) and not world.enqueues)
        self._inboxes = {
            c: Inbox(world, c, c in program.varying, program.depth[c], self._poster)
            for c in program.incoming
        }
        self._outboxes = {
            c: Outbox(world, c, c in program.varying, program.depth[c]) for c in program.outgoing
        }
        # The threads end with the transport, even if nobody closes it.
        workers = [
            self._poster,
            *(outbox.worker for outbox in self._outboxes.values()),
        ]
        self._finish = weakref.finalize(self, _end, workers)
        world.channels.add(self)

    def open(self, ragged: bool = False) -> None:
        """Begins a step. `ragged` is what the rank of the first stage knows from the batch."""
        self.ragged = ragged
        for inbox in self._inboxes.values():
            inbox.open(self._messages)
        for outbox in self._outboxes.values():
            outbox.open(self._messages)

    def rewind(self, begun: tuple[Begun, ...]) -> None:
        """Begins a step again, on all ranks. Messages sent anew fill the posted receives."""
        for channel, sent, taken in begun:
            self._inboxes[channel].rewind(sent, taken)

    def take(self, channel: Channel, microbatch: int) -> tuple[Tensor, ...]:
        """Returns the next message of a channel."""
        inbox = self._inboxes[channel]
        tensors = inbox.take(microbatch)
        self.ragged = self.ragged or inbox.ragged
        return tensors

    def put(self, channel: Channel, microbatch: int, tensors: tuple[Tensor, ...]) -> None:
        """Sends a message. Its tensors must not change until the peer has them."""
        self._outboxes[channel].put(microbatch, tensors, self.ragged)

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
