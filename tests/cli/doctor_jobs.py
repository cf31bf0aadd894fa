"""`dynmo doctor` on ranks of the pool, each with a fault of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch

from dynmo.cli import main
from dynmo.doctor.ranks import measure
from dynmo.runtime.comm.meeting import Meeting
from tests.jobs import command


def measured(world: Meeting, fault: str) -> list[dict[str, Any]]:
    """What the ranks find of each other if the last one has a fault."""
    with FAULTS[fault]() if world.rank == world.size - 1 else contextlib.nullcontext():
        return [vars(each) for each in measure(world)]


def _delayed() -> AbstractContextManager[object]:
    product = torch.mm

    def late(*tensors: torch.Tensor) -> torch.Tensor:
        time.sleep(0.1)
        return product(*tensors)

    return mock.patch("torch.mm", late)


def _ahead() -> AbstractContextManager[object]:
    now = time.time

    def later() -> float:
        return now() + 100

    return mock.patch("time.time", later)


@contextlib.contextmanager
def _crowded() -> Iterator[None]:
    """Puts this rank on one core, together with other processes."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(8)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()
        os.sched_setaffinity(0, cores)


FAULTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "none": contextlib.nullcontext,
    "delayed": _delayed,
    "ahead": _ahead,
    "crowded": _crowded,
}


def on_two_machines(world: Meeting, folder: str, port: str) -> tuple[int, str, str]:
    """`dynmo doctor` under torchrun, with each rank on a machine of its own. One disk is full."""
    host, lines = f"host-{world.rank}", [["doctor", "--json"]] * world.size
    disk = shutil.disk_usage(folder)
    disk = disk._replace(free=1 << 20) if world.rank else disk._replace(free=1 << 40)

    def alone(line: list[str]) -> int:
        with (
            mock.patch.dict(os.environ, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}),
            mock.patch("dynmo.elastic.manager.own_node", return_value=host),
            mock.patch("dynmo.doctor.ranks.own_node", return_value=host),
            mock.patch("shutil.disk_usage", return_value=disk),
            mock.patch("dynmo.doctor.resources.spare_memory", return_value=1 << 40),
        ):
            return main(line)

    with mock.patch("tests.jobs.main", alone):
        return command(world, lines, folder, port)
