"""The training loop: runs that stop, resume and end.

A resumed run ends like an uninterrupted run.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dynmo.config import load
from dynmo.events import ChangeEvent, CheckpointEvent, EndEvent, RebalanceEvent, StepEvent, read
from dynmo.report.summary import summarize
from tests.equality import RANDOM_MOVES
from tests.pool import JobFailed, Pool

SCHEDULED = {"cases": ["freezing"], "freezing": {"schedule": [[2, 1], [6, 3]]}}
AUTO = {"cases": ["freezing"], "freezing": {"policy": "autofreeze", "every": 2}}


def config(ranks: int, dynamism: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "seed": 3,
        "model": {"blocks": 2, "hidden": 16, "heads": 2, "sequence": 8, "dropout": 0.1},
        "train": {
            "steps": 12,
            "global_batch": 6,
            "micro_batch": 2,
            "lr": 1e-2,
            "warmup": 2,
            "max_grad_norm": 0.5,
        },
        "parallel": {"pipeline": ranks, "timeout": 20.0},
        "balance": {"balancer": RANDOM_MOVES, "every": 1},
        "dynamism": dynamism,
        "checkpoint": {"every": 4},
        "trace": {"steps": 0},
    } | changes


@pytest.mark.parametrize(
    "dynamism",
    [
        pytest.param({}, id="plain", marks=pytest.mark.matrix),
        pytest.param(SCHEDULED, id="scheduled", marks=pytest.mark.matrix),
        pytest.param(AUTO, id="autofreeze"),
    ],
)
def test_resumed_run_equals_the_uninterrupted_run(
    pool: Pool, tmp_path: Path, dynamism: dict[str, Any]
) -> None:
    """A signal stops a run after step 4. The run resumes on fewer ranks.

    The run stops once more and resumes on more ranks. Loss and weights are the same.
    """
    whole = pool.run(
        "train_in", 3, config=config(3, dynamism), folder=str(_made(tmp_path / "whole"))
    )
    folder = str(_made(tmp_path / "parts"))
    first = pool.run("train_in", 3, config=config(3, dynamism), folder=folder, stop_after=4)
    assert [(r["interrupted"], r["steps"]) for r in first] == [(True, first[0]["steps"])] * 3
    assert 5 <= first[0]["steps"] <= 7
    second = pool.run(
        "train_in",
        1,
        config=config(1, dynamism),
        folder=folder,
        resume=True,
        stop_after=first[0]["steps"],
    )
    assert first[0]["steps"] < second[0]["steps"] < 10
    third = pool.run("train_in", 4, config=config(4, dynamism), folder=folder, resume=True)
    assert not third[0]["interrupted"]
    assert {r["weights_digest"] for r in third} == {whole[0]["weights_digest"]}
    assert third[0]["loss"] == whole[0]["loss"]
    events = [list(read(Path(f) / "events.jsonl")) for f in (tmp_path / "whole", folder)]
    losses = [{e.step: e.loss for e in each if isinstance(e, StepEvent)} for each in events]
    assert losses[0] == losses[1]
    assert sorted(losses[1]) == list(range(12))
    assert [e.reason for e in events[1] if isinstance(e, EndEvent)] == [
        "interrupted",
        "interrupted",
        "done",
    ]
    frozen = [{e.step: e.frozen for e in each if isinstance(e, StepEvent)} for each in events]
    assert frozen[0] == frozen[1]
    if dynamism:
        assert frozen[0][11] > 0, "nothing froze: this shows nothing"
        assert any(isinstance(e, ChangeEvent) for e in events[0])
    ids = [e.id for e in events[1] if isinstance(e, RebalanceEvent)]
    assert ids == list(range(1, len(ids) + 1)), "moves are numbered through"
    assert len(ids) > 5, "of the first part and of the last"


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_damaged_checkpoint_is_skipped(pool: Pool, tmp_path: Path) -> None:
    folder = _made(tmp_path / "run")
    whole = pool.run("train_in", 2, config=config(2, SCHEDULED), folder=str(folder))
    assert [
        e.path[-11:] for e in read(folder / "events.jsonl") if isinstance(e, CheckpointEvent)
    ] == [
        "step-000004",
        "step-000008",
        "step-000012",
    ]
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == [
        "latest",
        "step-000008",
        "step-000012",
    ]
    tensors = folder / "checkpoints" / "step-000012" / "layer-0002" / "tensors.safetensors"
    data = bytearray(tensors.read_bytes())
    data[-1] ^= 1
    tensors.write_bytes(data)
    resumed = pool.run("train_in", 2, config=config(2, SCHEDULED), folder=str(folder), resume=True)
    assert resumed[0]["weights_digest"] == whole[0]["weights_digest"]
    assert [e.step for e in read(folder / "events.jsonl") if isinstance(e, StepEvent)] == [
        *range(12),
        8,
        9,
        10,
        11,
    ]


def test_checkpoint_of_an_earlier_version_loads(pool: Pool, tmp_path: Path) -> None:
    """The manifest has no hash of its own. The run warns and loads the checkpoint."""
    folder = _made(tmp_path / "run")
    whole = pool.run("train_in", 1, config=config(1, {}), folder=str(folder))
    shutil.rmtree(folder / "checkpoints/step-000012")
    file = folder / "checkpoints/step-000008/manifest.json"
    manifest = json.loads(file.read_text())
    manifest.pop("sha256", None)
    file.write_text(json.dumps(manifest | {"version": 1}, indent=1))
    (resumed,) = pool.run("resume_and_listen", 1, config=config(1, {}), folder=str(folder))
    assert resumed["weights_digest"] == whole[0]["weights_digest"]
    missing, earlier = resumed["said"].splitlines()
    assert "'step-000012'" in missing
    assert "step-000008" in missing
    assert "step-000008" in earlier
    assert "hash" in earlier
    # The keys that its state lacks are told, too.
    del manifest["state"]["moves"]
    file.write_text(json.dumps(manifest | {"version": 1}, indent=1))
    shutil.rmtree(folder / "checkpoints/step-000012")
    with pytest.raises(JobFailed, match="'moves'"):
        pool.run("train_in", 1, config=config(1, {}), folder=str(folder), resume=True)


def test_resumed_finished_run_keeps_its_result(pool: Pool, tmp_path: Path) -> None:
    """No step is left, and the loss is still known. The log has no NaN."""
    folder = _made(tmp_path / "run")
    done = pool.run("train_in", 2, config=config(2, {}), folder=str(folder))
    resumed = pool.run("train_in", 2, config=config(2, {}), folder=str(folder), resume=True)
    assert [resumed[0][key] for key in ("loss", "weights_digest", "steps", "interrupted")] == [
        done[0][key] for key in ("loss", "weights_digest", "steps", "interrupted")
    ]
    json.loads((folder / "events.jsonl").read_text().splitlines()[-1], parse_constant=pytest.fail)


def test_resume_with_fewer_steps_than_the_checkpoint_trains_nothing(
    pool: Pool, tmp_path: Path
) -> None:
    """A run is cut off behind the checkpoint of step 8. The later steps no longer count."""
    folder = _made(tmp_path / "run")
    pool.run("train_in", 1, config=config(1, {}), folder=str(folder))
    shutil.rmtree(folder / "checkpoints" / "step-000012")
    (folder / "checkpoints" / "latest").write_text("step-000008")
    trace = folder / "trace.json"
    trace.write_text("of the steps that were trained")

    short = config(1, {})
    short["train"]["steps"], short["trace"] = 6, {"steps": 2}
    (resumed,) = pool.run("resume_and_listen", 1, config=short, folder=str(folder))
    summary = summarize(read(folder / "events.jsonl"))
    assert (summary.steps, summary.loss) == (8, resumed["loss"])
    assert summary.done[-1].loss == resumed["loss"]
    told = "step-000008 has 8 steps, and train.steps = 6: nothing is left to train; its loss is"
    assert resumed["said"].endswith(f"{told} {resumed['loss']:.6f}\n")
    assert trace.read_text() == "of the steps that were trained"


def test_unwritable_costs_file_does_not_fail_the_run(pool: Pool, tmp_path: Path) -> None:
    folder = _made(tmp_path / "run")
    (folder / "costs.json.tmp").mkdir()
    done = pool.run("train_in", 2, config=config(2, {}), folder=str(folder))
    last = json.loads((folder / "events.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["weights_digest"]) == ("end", done[0]["weights_digest"])
    assert not (folder / "costs.json").exists()


def test_measured_threshold_is_saved_in_the_run_config(pool: Pool, tmp_path: Path) -> None:
    """The saved config gives the same bits without a measurement, on any machine."""
    pruning = {
        "cases": ["pruning"],
        "pruning": {"start": 1, "end": 9, "every": 2, "dense_below": "measured"},
    }
    first = pool.run(
        "train_in", 2, config=config(2, pruning), folder=str(_made(tmp_path / "first"))
    )
    recorded = load(tmp_path / "first" / "config.toml").model_dump(mode="json")
    table = recorded["dynamism"]["pruning"]["dense_below"]
    assert sorted(table) == ["128x16", "16x16", "16x64", "48x16"]
    assert all(0 <= share <= 1 for share in table.values())
    (tmp_path / "first" / "config.toml").unlink()
    resumed = pool.run("train_in", 2, config=recorded, folder=str(_made(tmp_path / "again")))
    assert [r["weights_digest"] for r in resumed] == [r["weights_digest"] for r in first]
    assert not (tmp_path / "again" / "config.toml").exists(), "it says it already"


def test_resuming_with_another_model_is_refused(pool: Pool, tmp_path: Path) -> None:
    folder = _made(tmp_path / "run")
    pool.run("train_in", 2, config=config(2, {}), folder=str(folder))
    other = config(2, {})
    for change, match in (
        ({"hidden": 24}, "layer 0"),
        ({"blocks": 3}, "6 layers"),
        ({"tied": True}, "model.tied = False"),
    ):
        with pytest.raises(JobFailed, match=match):
            pool.run(
                "train_in",
                2,
                config=other | {"model": other["model"] | change},
                folder=str(folder),
                resume=True,
            )
    with pytest.raises(JobFailed, match=r"train.optimizer = 'adamw'"):
        pool.run(
            "train_in",
            2,
            config=other | {"train": other["train"] | {"optimizer": "sgd"}},
            folder=str(folder),
            resume=True,
        )
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(JobFailed, match="CheckpointError"):
        pool.run("train_in", 2, config=other, folder=str(folder), resume=True)


def test_output_cache_without_repeated_batches_is_refused(pool: Pool) -> None:
    """Every rank raises the same error.

    Evaluations repeat. Single sequences and whole batches repeat in a later epoch.
    """
    cached = {"cases": ["freezing"], "freezing": {"schedule": [[1, 2]], "cache_bytes": 1 << 20}}
    wanted = config(2, cached, checkpoint={}, balance={"balancer": "none"})
    wanted["model"]["dropout"] = 0.0
    with pytest.raises(JobFailed, match="cache_bytes = 1048576") as caught:
        pool.run("train", 2, config=wanted)
    assert str(caught.value).count("cache_bytes = 1048576") >= 2
    wanted["train"] |= {"eval_every": 4}
    (end,) = [e for e in pool.run("events", 2, config=wanted)[0] if e["event"] == "end"]
    assert end["spared_forwards"] == 2 * 2 * 4, (
        "two frozen layers in two more evaluations of four microbatches"
    )
