"""A fault in any phase of a run loses at most the steps since the last checkpoint."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dynmo.runtime.state.background import CAN_WRITE
from tests.train.disturbed import PHASES, STEPS, Fault, newest

pytestmark = pytest.mark.skipif(not CAN_WRITE, reason="a process beside the rank needs Linux")
EVERYDAY = [
    ("kill", "trains", 4),
    ("kill", "evaluates", 2),
    ("kill", "copies", 2),
    ("kill", "writes", 2),
    ("kill", "completes", 2),
    ("term", "compiles", 1),
    ("term", "evaluates", 1),
    ("term", "writes", 2),
    ("disk", "trains", 5),
    ("disk", "copies", 2),
    ("writer", "writes", 1),
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


def run(forks: subprocess.Popen[str], folder: Path, fault: Fault | None) -> dict[str, Any]:
    assert forks.stdin is not None
    assert forks.stdout is not None
    forks.stdin.write(json.dumps([str(folder), fault]) + "\n")
    forks.stdin.flush()
    return json.loads(forks.stdout.readline())


@pytest.fixture(scope="module")
def undisturbed(forks: subprocess.Popen[str], tmp_path_factory: pytest.TempPathFactory) -> str:
    return run(forks, tmp_path_factory.mktemp("whole"), None)["digest"]


def check(
    forks: subprocess.Popen[str], folder: Path, fault: Fault, digest: str, must: bool
) -> None:
    """Has a fault hit a run, and goes on. The fault may come too late unless it `must` not."""
    struck = run(forks, folder, fault)
    saved = newest(folder)
    if must and fault.kind == "kill":
        assert struck == {"signal": signal.SIGKILL}
    if must and fault.kind == "term":
        assert 0 < saved < STEPS, "a stop saves"
    if fault.kind == "writer":
        assert struck["digest"] == digest, "the run goes on"
    assert run(forks, folder, None) == {"digest": digest, "from": saved}
    assert newest(folder) == STEPS
    assert not list((folder / "checkpoints").glob("*.tmp"))


@pytest.mark.parametrize("fault", EVERYDAY, ids=lambda each: "-".join(map(str, each)))
def test_run_that_a_fault_hits_ends_with_the_same_weights(
    forks: subprocess.Popen[str], tmp_path: Path, undisturbed: str, fault: tuple[str, str, int]
) -> None:
    check(forks, tmp_path, Fault(*fault), undisturbed, must=True)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["kill", "term", "disk", "writer"])
@pytest.mark.parametrize("phase", PHASES)
def test_each_fault_in_each_phase_five_times(
    forks: subprocess.Popen[str], tmp_path: Path, undisturbed: str, kind: str, phase: str
) -> None:
    for call in range(1, 6):
        folder = tmp_path / str(call)
        folder.mkdir()
        check(forks, folder, Fault(kind, phase, call), undisturbed, must=False)
