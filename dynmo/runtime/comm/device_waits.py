"""Waits of a CUDA device, seen from the host.

A wait for a message holds up the stream and not the host, and never raises.

    host     take 0   take 1   put 0 ...                            `standing`: how long has the
    stream            F0 ..... [reached | message 1 ... | passed] F1    stream stood there?
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

POLL = 5e-5  # seconds between two looks at the device


class DeviceWait(NamedTuple):
    """A wait of one stream for `peers`. None means all others of the world."""

    reached: torch.cuda.Event
    passed: torch.cuda.Event
    peers: Sequence[int] | None
    what: str


class DeviceWaits:
    """The waits of one stream, in its order."""

    def __init__(self) -> None:
        self._open: deque[DeviceWait] = deque()
        self._since: float | None = None  # when the host saw the stream stand at the first of them

    @contextmanager
    def around(
        self, device: torch.device, peers: Sequence[int] | None, what: str
    ) -> Iterator[None]:
        """Marks a wait: work enqueued inside holds up the current stream."""
        stream = torch.cuda.current_stream(device)  # a thread's own current device may be another
        wait = DeviceWait(torch.cuda.Event(), torch.cuda.Event(), peers, what)
        wait.reached.record(stream)
        yield
        wait.passed.record(stream)
        self._open.append(wait)

    def standing(self) -> tuple[float, DeviceWait] | None:
        """Returns the wait at which the stream stands, and for how many seconds already."""
        while self._open and self._open[0].passed.query():
            self._open.popleft()
            self._since = None
        if not self._open or not self._open[0].reached.query():
            return None
        now = time.perf_counter()
        self._since = now if self._since is None else self._since
        return now - self._since, self._open[0]

    @property
    def any(self) -> bool:
        """Whether the last `standing` left waits that the stream had not passed."""
        return bool(self._open)


class DryTime:
    """For a host that asks a device: how long the stream has been dry."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._dry: float | None = None

    @property
    def seconds(self) -> float:
        if self._dry is None and self._stream.query():
            self._dry = time.perf_counter()
        return 0.0 if self._dry is None else time.perf_counter() - self._dry

    def renew(self) -> None:
        self._dry = None


class StagedReceive(dist.Work):
    """A receive into host memory, since gloo has no CUDA tensors.

        sender     device --copy--> host --gloo--> host --copy--> device     receiver

    `wait` waits for the message, and copies it to its target on the current stream.
    """

    def __init__(self, work: dist.Work, host: Tensor, target: Tensor) -> None:
        super().__init__()
        self._work, self._host, self._target = work, host, target

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._work.wait() if timeout is None else self._work.wait(timeout)
        self._target.copy_(self._host)
        return True
