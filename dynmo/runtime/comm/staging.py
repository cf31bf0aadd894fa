"""Receives that end in host memory and are copied to the device.

gloo has no CUDA tensors.

    sender     device --copy--> host --gloo--> host --copy--> device     receiver

The copies are on the current stream. The host waits for the first copy and for the message.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch import Tensor


class StagedReceive(dist.Work):
    """A receive into host memory. `wait` also copies the message to its target."""

    def __init__(self, work: dist.Work, host: Tensor, target: Tensor) -> None:
        super().__init__()
        self._work, self._host, self._target = work, host, target

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._work.wait() if timeout is None else self._work.wait(timeout)
        self._target.copy_(self._host)
        return True
