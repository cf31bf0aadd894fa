"""`dynmo.init`: threads, and programs that have their own process groups."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dynmo.errors import ConfigError
from dynmo.pipeline.start import init
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.comm.rendezvous import read_rendezvous
from dynmo.runtime.comm.store import open_rendezvous
from tests.cli.runs import free_port
from tests.jobs import launched
from tests.pool import Pool
from tests.processes import run_script


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_world_has_one_thread_and_restores_the_old_number(caplog: pytest.LogCaptureFixture) -> None:
    with init(device="cpu"):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    (line,) = caplog.messages
    assert line.startswith("dynmo: threads = 1 ")
    with pytest.raises(KeyError), init(device="cpu", threads=1):
        raise KeyError
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_number_of_threads_that_torch_has_is_no_news(caplog: pytest.LogCaptureFixture) -> None:
    with init(device="cpu", threads=2):
        assert torch.get_num_threads() == 2
    assert not caplog.messages


@pytest.mark.parametrize("threads", [0, "2", 1025])
def test_wrong_number_of_threads_is_refused(threads: Any) -> None:
    with pytest.raises(ConfigError, match=r"dynmo\.init: threads = "):
        init(device="cpu", threads=threads)


def test_ranks_with_different_threads_are_refused(pool: Pool) -> None:
    for refused, threads, left in pool.run("tests.pipeline.jobs:threaded", 3):
        assert refused.startswith("threads = 1 on rank 0, 2 on rank 1, 3 on rank 2; ")
        assert (threads, left) == (2, 0)


def worlds(world: Meeting, port: str, folder: str) -> list[Any]:
    """Several worlds of the same processes, one of which fails. Newcomers find each of them."""
    told, file = list[Any](), Path(folder, "rendezvous")
    with launched(world, world.size, port):
        for number in range(3):
            with contextlib.suppress(KeyError), init(device="cpu", rendezvous=file) as own:
                assert isinstance(own, Meeting)
                told.append(int(own.sum(torch.tensor(own.rank + number), "a number")))
                if own.rank == 0:
                    found = open_rendezvous(read_rendezvous(file), 5.0)
                    told.append(found.check(["gen/0/here/1"]))
                if number == 1 and own.rank == 1:
                    raise KeyError
    return told


def test_same_processes_form_further_worlds(pool: Pool, tmp_path: Path) -> None:
    job = "tests.pipeline.test_start:worlds"
    first, second = pool.run(job, 2, port=free_port(), folder=str(tmp_path))
    assert first == [1, True, 3, True, 5, True]
    assert second == [1, 3, 5]


@pytest.mark.matrix
def test_given_process_groups_and_meshes_train_the_same() -> None:
    out = run_script(Path(__file__).with_name("adopting.py"), ranks=4)
    rows = re.findall(r"(\w+) (\d) of (\d): (\w{64})", out)
    places = {"middle": "01", "mesh": "0123", "all": "0123"}
    found = [place + rank for place, rank, _, _ in rows]
    assert sorted(found) == sorted(place + rank for place in places for rank in places[place])
    of = {place: {row[3] for row in rows if row[0] == place} for place in places}
    assert len(of["middle"] | of["all"]) == len(of["mesh"]) == 1
    assert out.count("a process group that it is not in") == 2
    # The program's own group outlives dynmo's worlds.
    assert out.count("total 4") == 4


def test_group_needs_initialized_torch_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    with pytest.raises(ConfigError, match=r"torch\.distributed is not initialized"):
        init(dist.group.WORLD or object(), device="cpu")  # type: ignore[arg-type]
