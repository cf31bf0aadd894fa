"""A fault in any phase of a run loses at most the steps since the last checkpoint."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from dynmo.runtime.state.background import CAN_WRITE
from tests.train.disturbed import PHASES, STEPS, Fault, newest

pytestmark = pytest.mark.skipif(not CAN_WRITE, reason="a process beside the rank needs Linux")
EVERYDAY = [
    ("kill", "copies", 2),
    ("kill", "completes", 2),
    ("term", "compiles", 1),
    ("term", "writes", 2),
    ("disk", "trains", 5),
    ("writer", "writes", 3),
]


@pytest.fixture(scope="module")
def forks() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.train.disturbed"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


Mesh = tuple[int, int]
"""Ranks of a pipeline, and replicas."""

Start = Callable[[Path, Mesh, Fault | None], dict[str, Any]]


@pytest.fixture(scope="module")
def run(forks: subprocess.Popen[str]) -> Start:
    """Runs once in a folder. Returns what came of it."""

    def call(folder: Path, mesh: Mesh, fault: Fault | None) -> dict[str, Any]:
        assert forks.stdin is not None
        assert forks.stdout is not None
        forks.stdin.write(json.dumps([str(folder), mesh, fault]) + "\n")
        forks.stdin.flush()
        return json.loads(forks.stdout.readline())

    return call


@pytest.fixture(scope="module")
def digest(run: Start, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of a run of one rank that nothing disturbs."""
    return run(tmp_path_factory.mktemp("whole"), (1, 1), None)["digest"]


def check(run: Start, folder: Path, mesh: Mesh, fault: Fault, digest: str, must: bool) -> None:
    """Has a fault hit a run, and goes on. The fault may come too late unless it `must` not."""
    struck = run(folder, mesh, fault)
    saved = newest(folder)
    if must and fault.kind == "kill":
        assert struck == {"signal": signal.SIGKILL}
    if must and fault.kind == "term":
        assert 0 < saved < STEPS, "a stop saves"
    if fault.kind == "writer":
        assert struck["digest"] == digest, "the run goes on"
    assert run(folder, mesh, None) == {"digest": digest, "from": saved}
    assert newest(folder) == STEPS
    assert not list((folder / "checkpoints").glob("*.tmp"))


@pytest.mark.parametrize("fault", EVERYDAY, ids=lambda each: "-".join(map(str, each)))
def test_run_that_a_fault_hits_ends_with_the_same_weights(
    run: Start, tmp_path: Path, digest: str, fault: tuple[str, str, int]
) -> None:
    check(run, tmp_path, (1, 1), Fault(*fault), digest, must=True)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["kill", "term", "disk", "writer"])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(
    ("mesh", "calls"), [((1, 1), range(1, 6)), ((2, 1), (1, 2)), ((1, 2), (2,))]
)
def test_each_fault_in_each_phase(
    run: Start, tmp_path: Path, digest: str, mesh: Mesh, calls: Sequence[int], kind: str, phase: str
) -> None:
    for call in calls:
        folder = tmp_path / str(call)
        folder.mkdir()
        check(run, folder, mesh, Fault(kind, phase, call), digest, must=False)
