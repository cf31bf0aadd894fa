"""The training loop: runs that stop, resume and end."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from dynmo.change_events import ChangeEvent, RebalanceEvent
from dynmo.config import load
from dynmo.errors import RunError
from dynmo.event_log import read
from dynmo.events import CheckpointEvent, EndEvent, StepResult
from dynmo.train.trainer import Trainer
from tests.cli.runs import tree
from tests.combinations import mostly_matrix
from tests.equality import RANDOM_MOVES
from tests.pool import JobFailed, Pool

SCHEDULED = {"cases": ["freezing"], "freezing": {"schedule": [[2, 1], [5, 3]]}}
AUTO = {"cases": ["freezing"], "freezing": {"policy": "autofreeze", "every": 2}}


def config(ranks: int, dynamism: dict[str, Any], **changes: Any) -> dict[str, Any]:
    train = {"steps": 9, "global_batch": 6, "micro_batch": 2, "lr": 1e-2}
    return {
        "seed": 3,
        "model": {"blocks": 2, "hidden": 16, "heads": 2, "sequence": 8, "dropout": 0.1},
        "train": train | {"warmup": 2, "max_grad_norm": 0.5},
        "parallel": {"pipeline": ranks, "timeout": 20.0},
        "balance": {"balancer": RANDOM_MOVES, "every": 1},
        "dynamism": dynamism,
        "checkpoint": {"every": 3},
        "trace": {"steps": 0},
    } | changes


def trained(
    pool: Pool, ranks: int, folder: Path, dynamism: dict[str, Any] = SCHEDULED, **options: Any
) -> list[Any]:
    folder.mkdir(exist_ok=True)
    given = {"config": config(ranks, dynamism), "folder": str(folder)}
    return pool.run("train_in", ranks, **given, **options)


@pytest.mark.parametrize("dynamism", mostly_matrix([{}, SCHEDULED, AUTO], [AUTO]))
def test_resumed_run_equals_the_uninterrupted_run(
    pool: Pool, tmp_path: Path, dynamism: dict[str, Any]
) -> None:
    """A run stops, resumes on fewer ranks, stops once more, and resumes on more ranks."""
    train = partial(trained, pool, dynamism=dynamism)
    whole, folder = train(3, tmp_path / "whole"), tmp_path / "parts"
    first = train(3, folder, stop_after=1)
    assert [(r["interrupted"], r["steps"]) for r in first] == [(True, first[0]["steps"])] * 3
    assert 2 <= first[0]["steps"] <= 4
    second = train(1, folder, resume=True, stop_after=first[0]["steps"])
    assert first[0]["steps"] < second[0]["steps"] < 8
    third = train(4, folder, resume=True)
    assert not third[0]["interrupted"]
    assert {r["weights_digest"] for r in third} == {whole[0]["weights_digest"]}
    assert third[0]["loss"] == whole[0]["loss"]
    events = [list(read(f / "events.jsonl")) for f in (tmp_path / "whole", folder)]
    losses = [{e.step: e.loss for e in each if isinstance(e, StepResult)} for each in events]
    assert losses[0] == losses[1]
    assert sorted(losses[1]) == list(range(9))
    reasons = [e.reason for e in events[1] if isinstance(e, EndEvent)]
    assert reasons == ["interrupted", "interrupted", "done"]
    frozen = [{e.step: e.frozen for e in each if isinstance(e, StepResult)} for each in events]
    assert frozen[0] == frozen[1]
    if dynamism:
        assert frozen[0][8] > 0, "nothing froze: this shows nothing"
        assert any(isinstance(e, ChangeEvent) for e in events[0])
    moves = [e for e in events[1] if isinstance(e, RebalanceEvent)]
    assert [e.id for e in moves] == list(range(1, len(moves) + 1)), "moves are numbered through"
    assert moves[0].step < first[0]["steps"] < second[0]["steps"] <= moves[-1].step


@pytest.fixture(scope="module")
def finished(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The folder of a run of two ranks that has ended, and its result."""
    folder = tmp_path_factory.mktemp("finished")
    return folder, trained(pool, 2, folder)[0]


@pytest.fixture
def ended(finished: tuple[Path, Any], tmp_path: Path) -> tuple[Path, Any]:
    """A copy of that folder, and the result."""
    return shutil.copytree(finished[0], tmp_path / "run"), finished[1]


@pytest.fixture
def cut(ended: tuple[Path, Any]) -> tuple[Path, Any]:
    """A copy in which the checkpoint of step 6 is the last one."""
    folder, result = ended
    shutil.rmtree(folder / "checkpoints/step-000009")
    (folder / "checkpoints/latest").write_text("step-000006")
    return folder, result


def test_damaged_checkpoint_is_skipped(pool: Pool, ended: tuple[Path, Any]) -> None:
    folder, whole = ended
    log = folder / "events.jsonl"
    checkpoints = [e.path[-11:] for e in read(log) if isinstance(e, CheckpointEvent)]
    assert checkpoints == ["step-000003", "step-000006", "step-000009"]
    kept = sorted(p.name for p in (folder / "checkpoints").iterdir())
    assert kept == ["latest", "step-000006", "step-000009"]
    tensors = folder / "checkpoints" / "step-000009" / "layer-0002" / "tensors.safetensors"
    data = bytearray(tensors.read_bytes())
    data[-1] ^= 1
    tensors.write_bytes(data)
    resumed = trained(pool, 2, folder, resume=True)
    assert resumed[0]["weights_digest"] == whole["weights_digest"]
    assert [e.step for e in read(log) if isinstance(e, StepResult)] == [*range(9), 6, 7, 8]


def test_resumed_finished_run_keeps_its_result(pool: Pool, ended: tuple[Path, Any]) -> None:
    """No step is left, and the loss is still known. No file changes."""
    folder, done = ended
    before = tree(folder)
    (resumed, _) = trained(pool, 2, folder, resume=True)
    for key in ("loss", "weights_digest", "steps", "interrupted"):
        assert resumed[key] == done[key]
    assert tree(folder) == before


def test_run_that_died_before_its_end_event_gets_it(pool: Pool, ended: tuple[Path, Any]) -> None:
    folder, done = ended
    log = folder / "events.jsonl"
    *before, end = log.read_text().splitlines()
    log.write_text("\n".join(before) + "\n" + end[:20])
    trained(pool, 2, folder, resume=True)
    *kept, last = log.read_text().splitlines()
    assert kept == before
    last = json.loads(last)
    assert (last["event"], last["reason"]) == ("end", "done")
    assert last["weights_digest"] == done["weights_digest"]


def test_resume_with_fewer_steps_than_the_checkpoint_trains_nothing(
    pool: Pool, cut: tuple[Path, Any]
) -> None:
    folder, _ = cut
    before = tree(folder)
    short = config(1, SCHEDULED)
    short["train"]["steps"], short["trace"] = 5, {"steps": 2}
    (resumed,) = pool.run("resume_and_listen", 1, config=short, folder=str(folder))
    told = "step-000006 has 6 steps, and train.steps = 5: nothing is left to train; its loss is"
    assert resumed["said"].endswith(f"{told} {resumed['loss']:.6f}\n")
    assert tree(folder) == before


def test_unwritable_costs_file_does_not_fail_the_run(pool: Pool, cut: tuple[Path, Any]) -> None:
    folder, whole = cut
    (folder / "costs.json").unlink()
    (folder / "costs.json.tmp").mkdir()
    trained(pool, 2, folder, resume=True)
    last = json.loads((folder / "events.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["weights_digest"]) == ("end", whole["weights_digest"])
    assert not (folder / "costs.json").exists()


def test_measured_threshold_is_saved_in_the_run_config(pool: Pool, tmp_path: Path) -> None:
    """The saved config gives the same bits without a measurement, on any machine."""
    pruning = {"start": 1, "end": 3, "every": 2, "dense_below": "measured"}
    wanted = config(2, {"cases": ["pruning"], "pruning": pruning})
    wanted["train"]["steps"] = 4
    for name in ("first", "again"):
        (tmp_path / name).mkdir()
    first = pool.run("train_in", 2, config=wanted, folder=str(tmp_path / "first"))
    recorded = load(tmp_path / "first" / "config.toml").model_dump(mode="json")
    table = recorded["dynamism"]["pruning"]["dense_below"]
    assert sorted(table) == ["128x16", "16x16", "16x64", "48x16"]
    assert all(0 <= share <= 1 for share in table.values())
    (tmp_path / "first" / "config.toml").unlink()
    resumed = pool.run("train_in", 2, config=recorded, folder=str(tmp_path / "again"))
    assert [r["weights_digest"] for r in resumed] == [r["weights_digest"] for r in first]
    assert not (tmp_path / "again" / "config.toml").exists(), "it says it already"


def test_resuming_with_another_model_is_refused(pool: Pool, ended: tuple[Path, Any]) -> None:
    folder, _ = ended

    def resume(section: str, **changes: Any) -> None:
        wanted = config(1, SCHEDULED)
        wanted[section] |= changes
        pool.run("train_in", 1, config=wanted, folder=str(folder), resume=True)

    for change, match in (
        ({"hidden": 24}, "layer 0"),
        ({"blocks": 3}, "6 layers"),
        ({"tied": True}, "model.tied = False"),
    ):
        with pytest.raises(JobFailed, match=match):
            resume("model", **change)
    with pytest.raises(JobFailed, match=r"train.optimizer = 'adamw'"):
        resume("train", optimizer="sgd")
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(JobFailed, match="CheckpointError"):
        resume("model")


def test_output_cache_without_repeated_batches_is_refused(pool: Pool) -> None:
    """Evaluations repeat. Single sequences and whole batches repeat in a later epoch."""
    cached = {"cases": ["freezing"], "freezing": {"schedule": [[1, 2]], "cache_bytes": 1 << 20}}
    wanted = config(2, cached, checkpoint={}, balance={"balancer": "none"})
    wanted["model"]["dropout"] = 0.0
    with pytest.raises(JobFailed, match="cache_bytes = 1048576") as caught:
        pool.run("train", 2, config=wanted)
    assert str(caught.value).count("cache_bytes = 1048576") >= 2
    wanted["train"] |= {"steps": 6, "eval_every": 2}
    (end,) = [e for e in pool.run("events", 2, config=wanted)[0] if e["event"] == "end"]
    # Two frozen layers in two more evaluations of four microbatches.
    assert end["spared_forwards"] == 2 * 2 * 4


@pytest.mark.parametrize("left", [True, False])
def test_a_rank_without_a_place_after_a_fault_ends_as_one_that_leaves(left: bool) -> None:
    """Whatever it was at: the call raises, and the others go on."""
    trainer = Trainer.__new__(Trainer)
    trainer._log, trainer._leads, trainer._mesh = None, False, None
    pipeline: Any = SimpleNamespace(
        left=left, steps=3, measured=SimpleNamespace(loss=0.5), close=lambda: None
    )
    trainer.pipeline = pipeline
    error = RunError("this rank has left the training")
    with mock.patch.object(Trainer, "_run", side_effect=error):
        if left:
            result = trainer.run()
            assert (result.left, result.steps, result.loss) == (True, 3, 0.5)
        else:
            with pytest.raises(RunError):
                trainer.run()
