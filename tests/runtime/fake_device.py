"""A CUDA device whose work, and whose messages, are done when a test says so."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.comm.signed_store import SignedStore

CUDA = torch.device("cuda", 0)


@dataclass
class FakeDevice:
    given: int = 0
    done: int = 0

    def query(self) -> bool:
        """True if the stream has nothing left to do."""
        return self.done == self.given

    def catch_up(self) -> None:
        self.done = self.given


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self._device, self._at = device, 0

    def record(self, stream: FakeDevice) -> None:
        self._device.given += 1
        self._at = self._device.given

    def query(self) -> bool:
        return self._device.done >= self._at


def install(patch: pytest.MonkeyPatch) -> FakeDevice:
    """Takes torch's place for as long as the test runs."""
    device = FakeDevice()
    patch.setattr(torch.cuda, "Event", lambda: FakeEvent(device))
    patch.setattr(torch.cuda, "current_stream", lambda _: device)
    return device


@dataclass
class FakeWork:
    """NCCL's handle, or gloo's if `host`: that is complete only once it was waited for."""

    what: str
    host: bool
    completed: bool = False

    def is_completed(self) -> bool:
        return self.completed

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.completed |= self.host
        return True


@dataclass
class FakeCudaWorld(Meeting):
    """Notes what is sent and received. Headers are gloo's, as their tags tell."""

    group: Any = "never asked"
    works: list[FakeWork] = field(default_factory=list[FakeWork])

    def send(self, tensor: Tensor, target: int, tag: int) -> dist.Work:
        return self._work(f"send {target}", tag)

    def receive(self, tensor: Tensor, source: int, tag: int) -> dist.Work:
        return self._work(f"receive {source}", tag)

    def _work(self, what: str, tag: int) -> dist.Work:
        self.works.append(FakeWork(what, host=(1 << 19) <= tag < (1 << 20)))
        return cast(Any, self.works[-1])


def fake_world(rank: int = 0, size: int = 2, timeout: float = 0.2) -> FakeCudaWorld:
    return FakeCudaWorld(rank, size, CUDA, timeout, 0, SignedStore(dist.HashStore()))
