"""Rank 0 fails while a thread of it waits for rank 1.

Rank 1 ends after `DELAY` seconds.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time

import torch

import dynmo
from dynmo.errors import RunError
from dynmo.runtime.comm.world import World


def wait(world: World) -> None:
    with contextlib.suppress(RunError):
        world.wait(world.receive(torch.zeros(1), 1, 5), 1, "a message")


with dynmo.init(device="cpu", timeout=30) as world:
    if world.rank == 0:
        threading.Thread(target=wait, args=(world,), daemon=True).start()
        time.sleep(0.2)
        raise RunError("refused")
    time.sleep(0.2 + float(os.environ["DELAY"]))
    os._exit(0)
