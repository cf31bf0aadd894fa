"""Slow is not dead: what ends a wait for a rank, and what does not."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dynmo
from dynmo.activity import ACTIVITY
from dynmo.runtime.comm import heartbeat
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.comm.signed_store import SignedStore
from tests.pool import Pool
from tests.processes import wait_until
from tests.runtime.jobs import error_of

JOBS = "tests.runtime.comm.test_heartbeat:"
TIMEOUT = 0.4


def impatient(world: Meeting, work_timeout: float = 30.0, timeout: float = TIMEOUT) -> Meeting:
    """The same ranks with a short limit, after the set-up."""
    world.barrier("all to be here")
    world.close()
    world = Meeting.join(
        world.store,
        world.rank,
        world.size,
        timeout=timeout,
        generation=1,
        work_timeout=work_timeout,
    )
    world.barrier("all to be here again")
    world.end_setup()
    return world


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        logging.getLogger("dynmo.runtime.comm.heartbeat").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def works(
    world: Meeting,
    seconds: float,
    progress: bool,
    work_timeout: float,
    in_debugger: bool = False,
) -> list[Any]:
    """The last rank works, and the others wait for it, or for one that waits."""
    if in_debugger and world.rank == world.size - 1:
        os.environ["DYNMO_DEBUGGER"] = "1"
    lines, world = Lines(), impatient(world, work_timeout)
    last = world.size - 1

    def step() -> None:
        if world.rank == last:
            with ACTIVITY.doing("reads its data"):
                end, start = time.monotonic() + seconds, time.monotonic()
                while time.monotonic() < end:
                    time.sleep(0.02)
                    if progress:
                        ACTIVITY.progress(
                            "tokenises big.txt", int(4 * (time.monotonic() - start)), 8
                        )
        if world.rank < last:
            world.wait(world.receive(torch.zeros(1), world.rank + 1, 3), world.rank + 1, "a word")
        if world.rank:
            world.wait(world.send(torch.ones(1), world.rank - 1, 3), world.rank - 1, "its room")

    os.environ.pop("DYNMO_DEBUGGER", None)
    caught = error_of(step)
    world.close(failed=bool(caught))
    return [caught, lines.texts]


def test_slow_rank_is_waited_for(pool: Pool) -> None:
    """Rank 0 waits for rank 1, which waits for rank 2."""
    arguments = {"seconds": 3 * TIMEOUT, "progress": True, "work_timeout": 2 * TIMEOUT}
    (first, lines), (second, _), (third, _) = pool.run(JOBS + "works", 3, **arguments)
    assert first == second == third == []
    assert all(re.match(r"rank 0 has waited \d s for a word; rank ", line) for line in lines)
    assert "rank 2 reads its data (tokenises big.txt, " in lines[-1]


def test_rank_without_progress_is_given_up(pool: Pool) -> None:
    arguments = {"seconds": 3 * TIMEOUT, "progress": False, "work_timeout": 2 * TIMEOUT}
    ((kind, text), _), _ = pool.run(JOBS + "works", 2, **arguments)
    assert kind == "WaitTimeout"
    assert re.match(r"rank 0 waited \S+ s for rank 1: a word; rank 1 reads its data", text)
    assert text.endswith("raise parallel.work_timeout")


def test_rank_in_a_debugger_is_waited_for(pool: Pool) -> None:
    arguments = {"seconds": 2 * TIMEOUT, "progress": False, "work_timeout": TIMEOUT}
    assert pool.run(JOBS + "works", 2, in_debugger=True, **arguments)[0][0] == []


def wait_for_each_other(world: Meeting) -> list[str]:
    world, other = impatient(world), 1 - world.rank

    def wait() -> None:
        with ACTIVITY.doing("evaluates"):
            world.wait(world.receive(torch.zeros(1), other, 3), other, f"a word of {other}")

    said = error_of(wait)
    world.close(failed=True)
    return said


def test_ranks_that_wait_for_each_other_end(pool: Pool) -> None:
    told = pool.run(JOBS + "wait_for_each_other", 2)
    assert {kind for kind, _ in told} <= {"WaitTimeout", "RankDied"}
    late = [text for kind, text in told if kind == "WaitTimeout"]
    assert late
    assert any("evaluates and waits for a word of" in text for text in late)


def trained(world: Meeting, stopped: float, limit: float = 2.0) -> list[Any]:
    """Rank 1 stands still for so many seconds in step 2."""
    world = impatient(world, timeout=limit)
    if world.rank == 1:
        world.store.set("process", str(os.getpid()))
    process = int(world.store.get("process"))

    def stop() -> None:
        os.kill(process, signal.SIGSTOP)
        time.sleep(stopped)
        os.kill(process, signal.SIGCONT)

    digests = list[str]()

    def train() -> None:
        torch.manual_seed(1)
        layers = [nn.Linear(4, 4) for _ in range(4)]
        model = dynmo.Sequential(layers, nn.functional.mse_loss)
        pipeline = dynmo.Pipeline(model, world, microbatches=2)
        for step in range(4):
            if step == 2 and stopped and world.rank == 0:
                threading.Thread(target=stop).start()
            data = torch.full((4, 4), float(step))
            pipeline.step(data, data.sin())
        digests.append(pipeline.digest())

    caught = error_of(train)
    world.close(failed=bool(caught))
    return [caught, digests]


def test_stopped_rank_comes_back(pool: Pool) -> None:
    assert pool.run(JOBS + "trained", 2, stopped=0.6) == pool.run(JOBS + "trained", 2, stopped=0)


def test_silent_rank_is_dead(pool: Pool) -> None:
    (kind, text), _ = pool.run(JOBS + "trained", 2, stopped=1.2, limit=TIMEOUT)[0]
    assert kind == "WaitTimeout"
    assert text.startswith("rank 0 waited 0.4 s for rank 1: ")
    assert re.search(r"rank 1 is silent for \d s, and told before: \w+", text)


class Alone:
    """Rank 0 of 2, whose peer never comes."""

    rank = 0
    size = 2
    timeout = 0.1

    def global_rank(self, rank: int) -> int:
        return rank

    def describe_rank(self, rank: int) -> str:
        return f"rank {rank}"

    def fail(
        self,
        error: RuntimeError,
        peers: Sequence[int] | None,
        what: str,
        wait: heartbeat.Wait | None,
    ) -> NoReturn:
        raise error


def test_process_ends_that_cannot_leave_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, lines, world = list[int](), Lines(), Alone()
    monkeypatch.setattr(heartbeat, "_LEAVE", 0.2)
    monkeypatch.setattr(os, "_exit", ended.append)
    thread = heartbeat.Heartbeat(world, SignedStore(dist.HashStore()), 0.1, 0.1)
    try:
        with heartbeat.Wait(thread, world, None, "the sum of all"):
            wait_until(lambda: bool(ended))
    finally:
        thread.close()
    assert ended[0] == 1
    assert re.match(
        r"rank 0 cannot leave its wait for the sum of all, which is over", lines.texts[0]
    )
