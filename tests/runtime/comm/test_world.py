"""Waiting has an end, and says who waits for whom."""

from __future__ import annotations

import re
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from dynmo.errors import RunError
from dynmo.runtime.comm.agreement import agree
from dynmo.runtime.comm.rendezvous import ALONE, Rendezvous, from_environment
from dynmo.runtime.comm.store import open_store
from dynmo.runtime.comm.world import World
from tests.cli.runs import free_port
from tests.pool import Pool
from tests.runtime.alone import alone

JOBS = "tests.runtime.jobs.world:"


def test_a_rank_that_never_comes(pool: Pool) -> None:
    for rank, (kind, text) in enumerate(pool.run(JOBS + "one_never_comes", 2)):
        assert kind == "WaitTimeout"
        assert text == f"rank {rank} waited 1 s for rank 2 to join; started with too few ranks?"


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("sum", "rank 0 waited 1.5 s for rank 1: the end of the test"),
        ("message", "rank 0 waited 1.5 s for rank 1: the activation of microbatch 3"),
    ],
)
def test_a_rank_that_stays_away(pool: Pool, what: str, text: str) -> None:
    waiting, away = pool.run(JOBS + "one_is_late", 2, what=what)
    assert waiting == ["WaitTimeout", f"{text}; where it only takes longer, raise parallel.timeout"]
    assert away == []


def test_a_meeting_that_failed_is_forgotten(pool: Pool) -> None:
    assert pool.run(JOBS + "after_a_failed_meeting", 3) == [[3.0]] * 3


def test_a_rank_that_is_gone(pool: Pool) -> None:
    """The failure is known at once, not after the limit.

    It shows as the receive is posted, or as it is waited for.
    """
    (kind, text), _ = pool.run(JOBS + "one_is_late", 2, what="gone")
    assert kind == "RankDied"
    assert re.match(
        r"rank 0 lost rank 1 while waiting for (a message|the activation of microbatch 3) \(", text
    )


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (["a", "a", "a"], ""),
        (["a", None, "a"], ""),
        ([None, None, None], ""),
        (["a", "b", "a"], "rank 0 and rank 1 disagree on the plan"),
        (["a", "b", "b"], "rank 0 and ranks 1, 2 disagree on the plan"),
        ([None, "a", "b"], "rank 1 and rank 2 disagree on the plan"),
    ],
)
def test_agree(pool: Pool, said: list[str | None], text: str) -> None:
    """All ranks find out, those that said nothing too."""
    results = pool.run(JOBS + "agree", 3, said=said)
    assert len(set(results)) == 1
    assert results[0].split(";")[0] == text


@pytest.mark.parametrize(
    ("lists", "difference"),
    [
        (["ab", "ab", "ab"], None),
        (["abc", "axc", "abx"], [1, [1]]),
        (["abc", "abx", "aby"], [2, [1, 2]]),
        (["ab", "abc", "ab"], [2, [1]]),
        (["", "a", ""], [0, [1]]),
    ],
)
def test_first_difference(pool: Pool, lists: list[str], difference: list[object] | None) -> None:
    assert pool.run(JOBS + "compare", 3, lists=lists) == [difference] * 3


def test_a_process_that_no_launcher_started() -> None:
    with pytest.raises(
        RunError,
        match=(
            r"started alone, in no world of ranks: start it with torchrun, or "
            r".*`from_environment\(\) or ALONE`"
        ),
    ):
        open_store(None, 5)
    store = open_store(ALONE, 5)
    world = World.join(store, ALONE.rank, ALONE.size, timeout=5)
    try:
        assert world.sum(torch.ones(2), "nothing").tolist() == [1, 1]
    finally:
        world.close()


@contextmanager
def listener(answer: bytes) -> Iterator[int]:
    """The port of something on this machine that is no store."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_a_foreign_listener(capfd: pytest.CaptureFixture[str], answer: bytes) -> None:
    """One line after the limit, and nothing of torch's own.

    One that is silent: tests/cli.
    """
    told = "rank 1 could not meet the others at 127.0.0.1:"
    with listener(answer) as port, pytest.raises(RunError, match=told):
        open_store(Rendezvous(1, 2, 1, address="127.0.0.1", port=port), 0.5)
    assert capfd.readouterr().err == ""


def test_a_host_without_an_address(capfd: pytest.CaptureFixture[str]) -> None:
    place = Rendezvous(1, 2, 1, address="no-such-host.invalid", port=12345)
    with pytest.raises(RunError, match=r"rank 1 could not meet the others at no-such-host.invalid"):
        open_store(place, 0.3)
    assert capfd.readouterr().err == ""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/net")
def test_where_the_store_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else can reach a literal 127.x. The address of `localhost` varies.

    The machine decides what `localhost` is.
    """
    environ = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    environ["MASTER_PORT"] = free_port()
    rendezvous = from_environment(environ)
    assert rendezvous is not None
    store = open_store(rendezvous, 5)
    store.set("a", "b")
    port = f"{rendezvous.port:04X}"
    tables = (Path("/proc/net", name).read_text() for name in ("tcp", "tcp6"))
    rows = [row.split() for table in tables for row in table.splitlines()[1:]]
    listening = {local for _, local, _, state, *_ in rows if state == "0A" and local.endswith(port)}
    assert listening == {f"0100007F:{port}"}
    named = from_environment(environ | {"MASTER_ADDR": "localhost"})
    assert named is not None
    assert not named.loopback


def test_two_processes_of_one_rank(pool: Pool) -> None:
    """The second process is told, if its RANK or its MASTER_PORT is wrong.

    The port may be another run's.
    """
    said = pool.run(JOBS + "all_are_rank_0", 2)
    assert sum("another process is rank 0 of this run, too" in text for text in said) == 1
    assert sum("waited 1 s for rank 1 to join" in text for text in said) == 1


def test_a_world_of_one() -> None:
    world = alone()
    world.barrier("nobody")
    agree(world, b"0123456789", "the plan")
    assert world.sum(torch.ones(2), "nothing").tolist() == [1, 1]
    world.open_channels([(0, 0, 1)])
    with pytest.raises(RunError, match="rank 0 lost rank 3 while waiting for it"):
        world.fail(RuntimeError("connection reset"), [3], "it")
