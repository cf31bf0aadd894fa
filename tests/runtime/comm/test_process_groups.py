"""Strangers that take a rank's place in a new group."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dynmo.runtime.comm import process_groups
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.comm.signed_store import SignedStore
from tests.jobs import train
from tests.pool import Pool
from tests.runtime.jobs import error_of

JOBS = "tests.runtime.comm.test_process_groups:"
CONFIG = {
    "model": {"blocks": 2, "hidden": 16, "heads": 2, "sequence": 8},
    "train": {"steps": 2, "global_batch": 4, "micro_batch": 1, "reduction_slots": 2},
}


def with_stranger(
    world: Meeting, kind: str, config: dict[str, Any], groups: list[int], times: int
) -> list[Any]:
    """The last rank is a stranger in the first groups of these sizes. Then it is a rank again."""
    real, left, lines = process_groups.prove, dict.fromkeys(groups, times), list[str]()

    def prove(group: Any, rank: int, size: int, store: SignedStore, timeout: float) -> None:
        if world.rank == world.size - 1 and left.get(size):
            left[size] -= 1
            if kind == "silent":
                time.sleep(0.4)
                raise RuntimeError("it went away")
            store = SignedStore(store, b"" if kind == "no token" else b"another")
        real(group, rank, size, store, timeout)

    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("dynmo.runtime.comm")
    logger.addHandler(handler)
    patience = mock.patch.object(process_groups, "PATIENCE", 0.3 if kind == "silent" else 10)
    store = SignedStore(world.store, b"the token", "proof/")
    world.close()
    new = dict[str, Any]()

    def go() -> None:
        new["world"] = Meeting.join(store, world.rank, world.size, timeout=20, generation=1)
        new["digest"] = train(new["world"], config)["digest"]

    with mock.patch.object(process_groups, "prove", prove), patience:
        error = error_of(go)
    logger.removeHandler(handler)
    if "world" in new:
        new["world"].close(failed=bool(error))
    return [new.get("digest"), lines, error]


class _Pipe:
    """One end of a group of two. What it has sent can be sent again in its place."""

    def __init__(self, sent: Queue[torch.Tensor], received: Queue[torch.Tensor]) -> None:
        self._sent, self._received = sent, received

    def send(self, tensors: list[torch.Tensor], *_: int) -> mock.Mock:
        self._sent.put(tensors[0].clone())
        return mock.Mock()

    def recv(self, tensors: list[torch.Tensor], *_: int) -> mock.Mock:
        return mock.Mock(wait=lambda _: tensors[0].copy_(self._received.get(timeout=5)))


def test_proof_cannot_be_used_twice() -> None:
    store = SignedStore(dist.HashStore(), b"the token")
    ways = Queue[torch.Tensor](), Queue[torch.Tensor]()
    kept = list[torch.Tensor]()

    def keep(tensors: list[torch.Tensor], *_: int) -> mock.Mock:
        kept.append(tensors[0].clone())
        return _Pipe.send(second, tensors)

    second = _Pipe(*reversed(ways))
    with mock.patch.object(second, "send", keep), ThreadPoolExecutor() as threads:
        other = threads.submit(process_groups.prove, second, 1, 2, store, 5)
        process_groups.prove(_Pipe(*ways), 0, 2, store, 5)
        other.result()
    replayed = Queue[torch.Tensor]()
    for message in kept:
        replayed.put(message)
    with pytest.raises(process_groups.Unproven, match="token"):
        process_groups.prove(_Pipe(Queue(), replayed), 0, 2, store, 5)


@pytest.mark.parametrize("kind", ["no token", "another token", "silent"])
def test_strangers_are_dropped(pool: Pool, kind: str) -> None:
    config: dict[str, Any] = {**CONFIG, "parallel": {"pipeline": 2}}
    wanted = pool.run("train", 2, config=config)[0]["digest"]
    job = JOBS + "with_stranger"
    (digest, lines, _), second = pool.run(job, 2, kind=kind, config=config, groups=[2], times=1)
    assert digest == second[0] == wanted
    (line,) = lines
    assert second[1] == [], "rank 0 says it"
    assert "meet again" in line
    if kind != "silent":
        assert "in place of rank" in line or "for rank" in line


def test_strangers_in_groups_of_replicas_are_dropped(pool: Pool) -> None:
    config: dict[str, Any] = {**CONFIG, "parallel": {"pipeline": 2, "replicas": 2}}
    wanted = pool.run("train", 4, config=config)[0]["digest"]
    job = JOBS + "with_stranger"
    told = pool.run(job, 4, kind="another", config=config, groups=[2], times=1)
    assert [digest for digest, _, _ in told] == [wanted] * 4
    assert len(told[0][1]) == 1


def test_strangers_that_come_again_and_again_end_the_run(pool: Pool) -> None:
    config: dict[str, Any] = {**CONFIG, "parallel": {"pipeline": 2}}
    job = JOBS + "with_stranger"
    for _, _, (kind, text) in pool.run(job, 2, kind="another", config=config, groups=[2], times=99):
        assert kind == "RunError"
        assert "in 10 tries" in text
