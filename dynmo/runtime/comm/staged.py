"""Messages of CUDA tensors through host memory."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch import Tensor


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
