"""Training on two hosts, of which the second one is lost and regained.

By dynmo's launcher with `elastic.recover` the run goes on. By torchrun it ends and is started
again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from benchmarks.faults.hosts import FIRST, SECOND, disturb, heal, two_hosts, why_not
from dynmo.change_events import GrowEvent, RecoverEvent
from dynmo.config import parse
from dynmo.event_log import read
from dynmo.events import EndEvent, Event, StepResult
from tests.elastic.hosts import HAS_GROWN, IS_UP, RANKS, on_host
from tests.jobs import SOURCE
from tests.pool import Pool
from tests.processes import end_all, living, start, wait_until

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.clusters,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]

ROOT = Path(__file__).parents[2]
LIMIT = 120.0  # seconds: the machine may be busy
RUN: dict[str, Any] = {
    "name": "run",
    "data": {"source": SOURCE},
    "model": {"blocks": 4, "hidden": 32, "heads": 2, "sequence": 16, "dropout": 0.1},
    "train": {"steps": 200, "global_batch": 8, "micro_batch": 2},
    "parallel": {"device": "cpu", "timeout": 8.0},
    "dynamism": {"cases": ["python:tests.elastic.hosts:SlowUntilGrown"]},
    "trace": {"steps": 0},
}


class Hosts:
    """Two hosts with a common folder, and what a test has started there."""

    def __init__(self, names: list[str], folder: Path) -> None:
        self.names, self._folder = names, folder
        self.started: list[subprocess.Popen[str]] = []
        (folder / IS_UP).touch()

    def start(self, at: int, *command: str) -> subprocess.Popen[str]:
        env = {"PYTHONPATH": str(ROOT), "MASTER_ADDR": FIRST, "OMP_NUM_THREADS": "1"}
        env |= {"DYNMO_JOB": "two-hosts"}
        self.started.append(start(on_host(self.names[at], command), self._folder, env))
        return self.started[-1]

    def processes(self, at: int) -> list[int]:
        command = ["ip", "netns", "pids", self.names[at]]
        return [int(word) for word in subprocess.check_output(command, text=True).split()]

    def kill(self, at: int) -> None:
        """Ends all processes of a host."""
        for pid in self.processes(at):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def lose(self, how: Literal["killed", "cut"]) -> None:
        """Loses the second host. No process starts there until it is regained."""
        (self._folder / IS_UP).unlink()
        if how == "killed":
            self.kill(1)
        else:
            disturb("cut network", self.names[1])

    def regain(self) -> None:
        heal(self.names[1])
        (self._folder / IS_UP).touch()

    # -- the run -----------------------------------------------------------------------------------

    def events(self) -> list[Event]:
        log = self._folder / "runs" / "run" / "events.jsonl"
        return list(read(log)) if log.exists() else []

    def wait_for(self, kind: type[Event], count: int = 1) -> None:
        def come() -> bool:
            return sum(isinstance(event, kind) for event in self.events()) >= count

        wait_until(come, LIMIT)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with two_hosts(os.getpid()) as names:
        hosts = Hosts(names, tmp_path)
        try:
            yield hosts
        finally:
            end_all(hosts.started)
            for at in range(2):
                hosts.kill(at)
            wait_until(lambda: not living(tmp_path))


@pytest.fixture(scope="module")
def alone(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of one rank that nothing disturbs."""
    (config := dict(RUN)).pop("dynamism")
    folder = str(tmp_path_factory.mktemp("alone"))
    return pool.run("train_in", 1, config=config, folder=folder)[0]["weights_digest"]


def digest(event: Event) -> str:
    assert isinstance(event, EndEvent)
    return event.weights_digest


@pytest.mark.parametrize("how", ["killed", "cut"])
def test_dynmo_goes_on_without_a_host_and_takes_it_back(
    hosts: Hosts, alone: str, tmp_path: Path, how: Literal["killed", "cut"]
) -> None:
    """Ranks that were cut off live on, and end by themselves by `parallel.work_timeout`."""
    elastic = {"recover": "memory", "join_timeout": 60.0}
    parallel = RUN["parallel"] | {"pipeline": RANKS, "work_timeout": 60.0}
    config = parse(RUN | {"parallel": parallel, "elastic": elastic})
    (tmp_path / "run.toml").write_text(config.to_toml())
    process = hosts.start(0, sys.executable, "-m", "tests.elastic.hosts", *hosts.names)
    hosts.wait_for(StepResult, 5)
    lost = set(hosts.processes(1))
    hosts.lose(how)
    hosts.wait_for(RecoverEvent)
    hosts.regain()
    hosts.wait_for(GrowEvent)
    (tmp_path / HAS_GROWN).touch()
    _, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, errors
    told = hosts.events()
    (fault,) = (event for event in told if isinstance(event, RecoverEvent))
    (growth,) = (event for event in told if isinstance(event, GrowEvent))
    assert (fault.ranks_before, fault.ranks_after, growth.ranks_after) == (RANKS, RANKS - 1, RANKS)
    assert [where.partition(":")[0] for where in fault.lost] == [hosts.names[1]]
    assert fault.repeated <= 1
    assert digest(told[-1]) == alone
    wait_until(lambda: not lost & set(hosts.processes(1)), LIMIT)


def test_torchrun_ends_without_a_host_and_goes_on_from_a_checkpoint(
    hosts: Hosts, alone: str, tmp_path: Path
) -> None:
    """The host is cut off: no connection tells it."""
    parallel = RUN["parallel"] | {"pipeline": 2}
    config = parse(RUN | {"parallel": parallel, "checkpoint": {"every": 5}})
    (tmp_path / "run.toml").write_text(config.to_toml())

    def agents() -> list[subprocess.Popen[str]]:
        torchrun = sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"
        meet = "--rdzv-backend=c10d", f"--rdzv-endpoint={FIRST}:29500"
        run = "--no-python", sys.executable, "-m", "dynmo", "train", "run.toml"
        return [
            hosts.start(
                at,
                *torchrun,
                *meet,
                f"--rdzv-conf=is_host={not at}",
                f"--local-addr={(FIRST, SECOND)[at]}",
                *run,
            )
            for at in range(2)
        ]

    first, _ = agents()
    wait_until(lambda: any(tmp_path.glob("runs/run/checkpoints/step-*[0-9]")), LIMIT)
    hosts.lose("cut")
    _, errors = first.communicate(timeout=LIMIT)
    assert first.returncode == 1
    assert "for rank 1" in errors
    hosts.kill(1)
    hosts.regain()
    (tmp_path / HAS_GROWN).touch()
    ends = [(process, process.communicate(timeout=LIMIT)[1]) for process in agents()]
    assert [process.returncode for process, _ in ends] == [0, 0], ends
    assert "goes on from runs/run/checkpoints/step-" in ends[0][1]
    assert digest(hosts.events()[-1]) == alone
