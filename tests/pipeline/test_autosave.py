"""A pipeline that saves by itself: when, behind training, and with the same numbers."""

from __future__ import annotations

import errno
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import dynmo
from dynmo.errors import ConfigError, RunError
from dynmo.events import CheckpointEvent, Event, FaultEvent
from dynmo.pipeline import autosave
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.state import background, checkpoint
from dynmo.signals import signals_heard
from tests.pipeline import jobs
from tests.pipeline.jobs import batch
from tests.pool import Pool

JOBS = "tests.pipeline.test_autosave:"
make = partial(jobs.make, schedule="1f1b")


def train(pipeline: dynmo.Pipeline, steps: int) -> None:
    while pipeline.steps < steps:
        pipeline.step(*batch(pipeline.steps))


def saved(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.glob("step-*"))


def until_written(pipeline: dynmo.Pipeline) -> None:
    end = time.monotonic() + 10
    while (save := pipeline._parts.saves._under_way) is not None and not save.is_written:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_every_few_steps_and_at_the_end(world: dynmo.World, tmp_path: Path) -> None:
    events = list[Event]()
    saves = dynmo.Checkpoints(folder=tmp_path, every=2, keep=9)
    pipeline = make(world, checkpoint=saves, log=dynmo.Log(listen=events.append))
    train(pipeline, 5)
    pipeline.finish()
    assert saved(tmp_path) == ["step-000002", "step-000004", "step-000005"]
    told = [event for event in events if isinstance(event, CheckpointEvent)]
    assert [(Path(each.path).name, each.step) for each in told] == [
        ("step-000002", 1),
        ("step-000004", 3),
        ("step-000005", 4),
    ]
    assert all(each.waited is not None and each.waited <= each.seconds for each in told)
    pipeline.finish()
    assert len(saved(tmp_path)) == 3, "a step is saved once"


@pytest.mark.parametrize("every", [1, "auto"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_saving_changes_no_number(pool: Pool, tmp_path: Path, ranks: int, every: Any) -> None:
    """Each step of a run can be gone on from, whatever is being written meanwhile."""
    digests = pool.run(JOBS + "save_behind", ranks, folder=str(tmp_path), every=every)
    assert digests == [digests[0]] * ranks
    assert digests[0][0] == digests[0][1], "as without checkpoints"
    assert digests[0][0] == digests[0][2], "as resumed from any"


def test_zero_never_saves(world: dynmo.World, tmp_path: Path) -> None:
    pipeline = make(world, checkpoint=dynmo.Checkpoints(folder=tmp_path, every=0))
    train(pipeline, 2)
    pipeline.finish()
    assert saved(tmp_path) == []


def test_a_signal_saves_on_all_ranks(pool: Pool, tmp_path: Path) -> None:
    """SIGUSR1 on one rank saves, and training goes on. SIGTERM saves at once, and asks to stop."""
    rows = pool.run(JOBS + "signalled", 2, folder=str(tmp_path))
    for row in rows:
        assert row["after USR1"] == ["step-000003"]
        assert row["stops"] == [False, False, False, False, True]
        assert row["after TERM"] == ["step-000003", "step-000005"]


def test_a_training_may_go_on_after_a_stop(world: dynmo.World, tmp_path: Path) -> None:
    pipeline = make(world, checkpoint=dynmo.Checkpoints(folder=tmp_path, keep=9))
    assert pipeline.step(*batch(0), stop=True).stop
    train(pipeline, 3)
    pipeline.finish()
    assert saved(tmp_path) == ["step-000001", "step-000003"]


@pytest.mark.parametrize("goes_on", [False, True])
def test_loop_that_goes_on_after_a_stop_is_saved(
    world: dynmo.World, tmp_path: Path, goes_on: bool
) -> None:
    """A scheduler of the learning rate makes its step after that of the pipeline."""
    rate, events = {"steps": 0}, list[Event]()
    saves = dynmo.Checkpoints(folder=tmp_path, extra=lambda: rate)
    pipeline = make(world, checkpoint=saves, log=dynmo.Log(listen=events.append))
    assert pipeline.step(*batch(0), stop=True).stop
    rate["steps"] += goes_on
    pipeline.finish()
    assert sum(isinstance(each, CheckpointEvent) for each in events) == 1 + goes_on
    pipeline.load(tmp_path)
    assert pipeline.extra == {"steps": int(goes_on)}


def test_rank_that_has_left_saves_nothing(pool: Pool, tmp_path: Path) -> None:
    """Its layers are those of other ranks now. Signals end it while it waits."""
    stays, leaves = pool.run(JOBS + "leave", 2, folder=str(tmp_path))
    assert (stays["left"], leaves["left"]) == (False, True)
    assert leaves["signals"] == "as before"
    assert saved(tmp_path) == ["step-000004"]
    checkpoint.verify(tmp_path / "step-000004")


@pytest.mark.parametrize("stops", [False, True])
def test_signal_in_the_step_before_a_rank_joins(pool: Pool, tmp_path: Path, stops: bool) -> None:
    """The newcomer knows nothing of it, so the others save first. A training that ends stays."""
    rows = pool.run(JOBS + "signalled_before_a_rank_joins", 2, folder=str(tmp_path), stops=stops)
    assert rows == [[5 if stops else 6, False], [2 if stops else 6, stops]]
    assert saved(tmp_path) == ["step-000004", "step-000005" if stops else "step-000006"]


def test_signals_are_as_before_once_training_is_over(world: dynmo.World, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    pipeline = make(world, checkpoint=dynmo.Checkpoints(folder=tmp_path))
    assert signal.getsignal(signal.SIGTERM) is before, "there is nothing to save"
    train(pipeline, 1)
    assert signal.getsignal(signal.SIGTERM) is not before
    pipeline.finish()
    assert signal.getsignal(signal.SIGTERM) is before
    with signals_heard() as outer:
        train(pipeline, 2)
        os.kill(os.getpid(), signal.SIGTERM)
        assert outer.stops
        assert pipeline.step(*batch(2)).stop
        pipeline.close()
        assert outer.stops
    assert signal.getsignal(signal.SIGTERM) is before


def test_failure_is_told_once_and_the_run_goes_on(world: dynmo.World, tmp_path: Path) -> None:
    """The checkpoint before stays."""
    events = list[Event]()
    saves = dynmo.Checkpoints(folder=tmp_path, every=2)
    pipeline = make(world, checkpoint=saves, log=dynmo.Log(listen=events.append))
    train(pipeline, 3)
    until_written(pipeline)
    train(pipeline, 4)
    background._end()
    writer = background._running().process
    writer.send_signal(signal.SIGSTOP)
    pipeline.step(*batch(4))
    assert pipeline._parts.saves._under_way is not None
    assert saved(tmp_path) == ["step-000002", "step-000004.tmp"]
    writer.kill()
    train(pipeline, 7)
    pipeline.finish()
    faults = [event.what for event in events if isinstance(event, FaultEvent)]
    assert len(faults) == 1
    assert "step-000004.tmp could not be written (rank 0: the process" in faults[0]
    assert faults[0].endswith("the run goes on")
    assert saved(tmp_path) == ["step-000006", "step-000007"]
    assert make(world).load(tmp_path) == 7


def test_folder_that_cannot_be_made_is_told(world: dynmo.World, tmp_path: Path) -> None:
    """A save at the end raises, as there is no later one."""
    events, folder = list[Event](), tmp_path / "file"
    folder.touch()
    saves = dynmo.Checkpoints(folder=folder, every=2)
    pipeline = make(world, checkpoint=saves, log=dynmo.Log(listen=events.append))
    train(pipeline, 5)
    faults = [event.what for event in events if isinstance(event, FaultEvent)]
    assert len(faults) == 2
    assert "step-000002.tmp could not be written (rank 0: Not a directory)" in faults[0]
    with pytest.raises(RunError, match=r"step-000005\.tmp could not be written"):
        pipeline.finish()
    folder.unlink()
    train(pipeline, 7)
    pipeline.finish()
    assert saved(folder) == ["step-000006", "step-000007"]


def test_process_that_cannot_start_fails_one_save(world: dynmo.World, tmp_path: Path) -> None:
    pipeline = make(world, checkpoint=dynmo.Checkpoints(folder=tmp_path, every=2))
    background._end()
    with mock.patch("subprocess.Popen", side_effect=OSError(errno.EMFILE, "Too many open files")):
        train(pipeline, 3)
    train(pipeline, 4)
    pipeline.finish()
    assert saved(tmp_path) == ["step-000004"]


def test_extra_is_that_of_the_step(world: dynmo.World, tmp_path: Path) -> None:
    """The loop goes on to change it while the checkpoint is written."""
    losses = list[float]()
    saves = dynmo.Checkpoints(folder=tmp_path, every=2, extra=lambda: {"losses": losses})
    pipeline = make(world, checkpoint=saves)
    background._end()
    writer = background._running().process
    writer.send_signal(signal.SIGSTOP)
    for step in range(3):
        losses.append(pipeline.step(*batch(step)).loss)
    writer.send_signal(signal.SIGCONT)
    pipeline.load(tmp_path)
    assert pipeline.extra == {"losses": losses[:2]}


@pytest.mark.parametrize("given", [False, True])
def test_extra_of_the_loop_is_saved(world: dynmo.World, tmp_path: Path, given: bool) -> None:
    count = iter(range(9))
    extra: dict[str, Any] = {"extra": lambda: {"drawn": next(count)}} if given else {}
    saves = dynmo.Checkpoints(folder=tmp_path, every=1, **extra)
    pipeline = make(world, checkpoint=saves)
    pipeline.extra["kept"] = "by the loop"
    train(pipeline, 2)
    pipeline.finish()
    second = make(world)
    second.load(tmp_path)
    assert second.extra == ({"drawn": 1} if given else {"kept": "by the loop"})


def test_the_best_stays_by_itself(world: dynmo.World, tmp_path: Path) -> None:
    """Later checkpoints leave it, those of a resumed training, too."""
    pipeline = make(world, checkpoint=dynmo.Checkpoints(folder=tmp_path, every=1, keep=1))
    train(pipeline, 2)
    pipeline.save(tmp_path, keep=1, best=2)
    train(pipeline, 5)
    pipeline.finish()
    assert saved(tmp_path) == ["step-000002", "step-000005"]
    second = make(world, checkpoint=dynmo.Checkpoints(folder=tmp_path, every=1, keep=1))
    second.load(tmp_path)
    train(second, 7)
    second.finish()
    assert saved(tmp_path) == ["step-000002", "step-000007"]


def test_without_memory_for_a_copy_training_waits(
    world: dynmo.World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pipeline = make(world, checkpoint=dynmo.Checkpoints(folder=tmp_path, every=1))
    with mock.patch("dynmo.pipeline.saving.spare_memory", return_value=100):
        train(pipeline, 2)
    assert "rank 0 waits for its checkpoints: a copy of" in caplog.text
    until_written(pipeline)
    pipeline.finish()
    assert saved(tmp_path) == ["step-000001", "step-000002"]


@pytest.mark.parametrize("wrong", ["runs/a", {"folder": "runs/a"}])
def test_another_kind_of_thing_is_refused(world: dynmo.World, wrong: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"checkpoint is .*; give dynmo.Checkpoints\(folder=\.\.\."
    ):
        make(world, checkpoint=wrong)


# -- in the ranks ----------------------------------------------------------------------------------


def save_behind(world: Meeting, folder: str, every: Any) -> list[str]:
    """The digests of a run with checkpoints, of one without, and of one resumed from each step."""
    plain = make(world)
    train(plain, 6)
    saves = dynmo.Checkpoints(folder=folder, every=every, keep=9)
    with mock.patch.object(autosave, "EVERY", 0.0):
        pipeline = make(world, checkpoint=saves)
        while pipeline.steps < 6:
            pipeline.advance(*batch(pipeline.steps))
        pipeline.finish()
    paths = sorted(Path(folder).glob("step-*"))
    assert len(paths) > (1 if every == "auto" else 5)
    resumed = set[str]()
    for path in paths:
        checkpoint.verify(path)
        alone = path.parent / f"only-{path.name}-{world.rank}"
        alone.mkdir()
        (alone / path.name).symlink_to(path)
        second = make(world)
        second.load(alone)
        train(second, 6)
        resumed.add(second.digest())
    assert len(resumed) == 1
    return [plain.digest(), pipeline.digest(), *resumed]


def signalled(world: Meeting, folder: str) -> dict[str, Any]:
    path, stops = Path(folder), list[bool]()
    pipeline = make(world, checkpoint=dynmo.Checkpoints(folder=path))

    def step() -> None:
        stops.append(pipeline.step(*batch(pipeline.steps)).stop)

    step()
    step()
    if world.rank == world.size - 1:
        os.kill(os.getpid(), signal.SIGUSR1)
    step()
    pipeline.adapt()
    until_written(pipeline)
    step()
    after = saved(path)
    if world.rank == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    step()
    row = {"stops": stops, "after USR1": after, "after TERM": saved(path)}
    pipeline.close()
    return row


def leave(world: Meeting, folder: str) -> dict[str, Any]:
    before = signal.getsignal(signal.SIGTERM)
    elastic = dynmo.Elastic(reshape_at=((2, 1, 1),))
    pipeline = make(world, checkpoint=dynmo.Checkpoints(folder=folder), elastic=elastic)
    while pipeline.steps < 4:
        pipeline.adapt()
        if pipeline.left:
            break
        pipeline.step(*batch(pipeline.steps))
    pipeline.finish()
    left, changed = pipeline.left, False
    if left:
        train_again = pipeline.join(lambda: True)
        assert not train_again
        changed = signal.getsignal(signal.SIGTERM) is not before
    pipeline.close()
    return {"left": left, "signals": "others" if changed else "as before"}


def signalled_before_a_rank_joins(world: Meeting, folder: str, stops: bool) -> list[Any]:
    elastic = dynmo.Elastic(reshape_at=((2, 1, 1), (4, 2, 1)), join_timeout=20)
    saves = dynmo.Checkpoints(folder=folder)
    pipeline = make(world, checkpoint=saves, elastic=elastic, post_validation=True)
    leads, stop = world.rank == 0, False
    while pipeline.steps < 6 and not stop:
        stop = any(result.stop for result in pipeline.adapt())
        if pipeline.left and not pipeline.join():
            break
        if pipeline.steps == 3 and leads:
            os.kill(os.getpid(), signal.SIGTERM if stops else signal.SIGUSR1)
        stop |= any(result.stop for result in pipeline.advance(*batch(pipeline.steps)))
    if not pipeline.left:
        pipeline.finish()
    pipeline.close()
    return [pipeline.steps, pipeline.left]


def test_signal_in_a_step_that_fails_is_heard_in_the_next(
    world: dynmo.World, tmp_path: Path
) -> None:
    pipeline = make(world, checkpoint=dynmo.Checkpoints(folder=tmp_path))
    train(pipeline, 1)
    os.kill(os.getpid(), signal.SIGUSR1)
    with pytest.raises(dynmo.DynmoError):
        pipeline.step(batch(1)[0], None)
    train(pipeline, 3)
    pipeline.finish()
    assert saved(tmp_path) == ["step-000002", "step-000003"]


def test_each_pipeline_of_a_process_hears_a_signal(world: dynmo.World, tmp_path: Path) -> None:
    folders = [tmp_path / "first", tmp_path / "second"]
    pipelines = [make(world, checkpoint=dynmo.Checkpoints(folder=each)) for each in folders]
    for pipeline in pipelines:
        train(pipeline, 1)
    os.kill(os.getpid(), signal.SIGUSR1)
    for pipeline in pipelines:
        train(pipeline, 3)
        until_written(pipeline)
        assert pipeline._parts.saves.step == 2
    pipelines[0].close()
    os.kill(os.getpid(), signal.SIGUSR1)
    train(pipelines[1], 5)
    assert pipelines[1]._parts.saves.step == 4
    pipelines[1].close()
