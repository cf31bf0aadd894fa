"""A process beside the rank writes the same checkpoint. Its death or a full disk loses no other."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynmo.errors import RunError
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.engine.engine import Engine
from dynmo.runtime.state import background, checkpoint
from dynmo.runtime.state.save import Save
from tests.full_disk import files_up_to
from tests.pool import Pool
from tests.runtime.alone import gpt
from tests.runtime.state.test_checkpoint import engine, names, save, steps

pytestmark = pytest.mark.skipif(not background.CAN_WRITE, reason="needs files in memory")
JOBS = "tests.runtime.state.test_background:"


@pytest.fixture
def own_writer() -> Iterator[None]:
    """The writer starts within the test, with its limits, and ends with it."""
    background._end()
    yield
    background._end()


def begin(pipeline: Engine, folder: Path, step: int) -> Save:
    world = pipeline.store.world
    under_way = Save(world, folder, step, pipeline.model.names, {}, 9, behind=True)
    under_way.take((i, (m, o.state())) for i, (m, o) in pipeline.store.own.items())
    return under_way


def content(path: Path) -> dict[str, bytes]:
    files = {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}
    del files["manifest.json"]  # it names the step
    return files


def test_writer_makes_the_same_files(tmp_path: Path) -> None:
    pipeline = gpt()
    at_once = save(pipeline, tmp_path, 1)
    behind = begin(pipeline, tmp_path, 2).complete()
    assert content(behind.path) == content(at_once.path)
    assert behind.bytes == at_once.bytes
    assert behind.waited <= behind.seconds
    assert checkpoint.verify(behind.path).step == 2
    assert names(tmp_path) == ["latest", "step-000001", "step-000002"]


def test_layers_may_change_while_the_writer_writes(pool: Pool, tmp_path: Path) -> None:
    """Two ranks train on, and the checkpoint has the weights of its step."""
    digests = pool.run(JOBS + "save_and_train_on", 2, folder=str(tmp_path))
    assert digests == [["equal", True]] * 2


def test_checkpoint_has_no_name_before_it_is_complete(tmp_path: Path) -> None:
    under_way = begin(gpt(), tmp_path, 3)
    assert names(tmp_path) == ["step-000003.tmp"]
    end = time.monotonic() + 10
    while not under_way.is_written:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert names(tmp_path) == ["step-000003.tmp"]
    assert under_way.complete().path.name == "step-000003"


def test_pages_of_files_leave_room_for_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container that has read its data has no other memory left, if they count."""
    for name, text in {
        "max": "1000",
        "current": "990",
        "stat": "anon 90\ninactive_file 900",
    }.items():
        (tmp_path / f"memory.{name}").write_text(text)
    monkeypatch.setattr(background, "_GROUP", tmp_path)
    assert background.spare_memory() == 910
    (tmp_path / "memory.max").write_text("max")
    assert background.spare_memory() > 1 << 20


@pytest.mark.usefixtures("own_writer")
def test_full_disk_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    pipeline = gpt()
    save(pipeline, tmp_path, 1)
    with files_up_to(1000):
        background._running()
    with pytest.raises(RunError) as caught:
        begin(pipeline, tmp_path, 2).complete()
    assert re.fullmatch(
        r"\S+/step-000002.tmp could not be written \(rank 0: File too large\); "
        "earlier checkpoints are untouched",
        str(caught.value),
    )
    assert names(tmp_path) == ["latest", "step-000001"]


@pytest.mark.usefixtures("own_writer")
def test_killed_writer_fails_one_save(tmp_path: Path) -> None:
    pipeline = gpt()
    save(pipeline, tmp_path, 1)
    os.kill(background._running().process.pid, signal.SIGSTOP)
    under_way = begin(pipeline, tmp_path, 2)
    assert not under_way.is_written
    os.kill(background._running().process.pid, signal.SIGKILL)
    with pytest.raises(RunError, match=r"process that writes it has ended with status -9\); ear"):
        under_way.complete()
    assert names(tmp_path) == ["latest", "step-000001"]
    begin(pipeline, tmp_path, 3).complete()
    assert checkpoint.find(tmp_path)[1].step == 3


@pytest.mark.usefixtures("own_writer")
def test_writer_that_was_killed_while_idle_is_replaced(tmp_path: Path) -> None:
    pipeline = gpt()
    begin(pipeline, tmp_path, 1).complete()
    process = background._running().process
    process.kill()
    process.wait()
    begin(pipeline, tmp_path, 2).complete()
    assert checkpoint.find(tmp_path)[1].step == 2


def test_save_asks_no_writer_but_its_own(tmp_path: Path) -> None:
    """Another would have no answer."""
    pipeline = gpt()
    under_way = begin(pipeline, tmp_path, 1)
    background._end()
    assert under_way.is_written
    with pytest.raises(RunError, match="the process that writes it has ended with status 0"):
        under_way.complete()
    assert begin(pipeline, tmp_path, 2).complete().path.name == "step-000002"


def test_dropped_save_does_not_disturb_the_next(tmp_path: Path) -> None:
    pipeline = gpt()
    begin(pipeline, tmp_path / "a", 1)
    begin(pipeline, tmp_path / "b", 2)
    assert begin(pipeline, tmp_path / "a", 3).complete().path.name == "step-000003"
    assert names(tmp_path / "a") == ["latest", "step-000003"]
    assert checkpoint.find(tmp_path / "a")[1].step == 3


def test_two_saves_at_once_get_their_own_answers(tmp_path: Path) -> None:
    first, second = gpt(), gpt(blocks=1)
    begun = [begin(first, tmp_path / "a", 1), begin(second, tmp_path / "b", 1)]
    for one in begun:
        checkpoint.verify(one.complete().path)


_RANK = """
import os, signal, sys, time
from pathlib import Path
from dynmo.runtime.state import background
files = background.MemoryFiles()
process = background._running().process
print(process.pid, flush=True)
process.send_signal(signal.SIGSTOP)
files.memory.write(b"x" * (1 << 26))
files.end_file(Path(sys.argv[1], "file"))
files.send()
process.send_signal(signal.SIGCONT)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_writer_ends_with_its_rank(tmp_path: Path) -> None:
    rank = subprocess.run(
        [sys.executable, "-c", _RANK, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert rank.returncode == -signal.SIGKILL, rank.stderr
    end = time.monotonic() + 10
    while Path(f"/proc/{int(rank.stdout)}").exists():
        assert time.monotonic() < end
        time.sleep(0.02)


# -- in the ranks ----------------------------------------------------------------------------------


def save_and_train_on(world: Meeting, folder: str) -> list[object]:
    pipe = engine(world, [3, 3])
    steps(pipe, 0, 2)
    save(pipe, Path(folder, "at once"), 2)
    under_way = begin(pipe, Path(folder, "behind"), 2)
    steps(pipe, 2, 4)
    path = under_way.complete().path
    same = content(path) == content(Path(folder, "at once", path.name))
    return ["equal", same]
