"""`checkpoint.keep_best` and `train.patience`: the lowest held-out loss of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

import dynmo
from dynmo.config import parse
from dynmo.errors import ConfigError
from dynmo.event_log import read
from dynmo.events import EndEvent
from dynmo.train.setup import model_of
from dynmo.train.trainer import Lowest, Trainer

LOSSES = [3.0, 2.0, 2.5, 1.5, 1.6, float("nan"), 1.5, 1.0]  # by step


def trainer(world: dynmo.World, folder: Path, resume: bool = False, **train: Any) -> Trainer:
    """A trainer whose evaluations give `LOSSES`."""
    config = parse(
        {
            "model": {"blocks": 1, "hidden": 8, "heads": 1, "sequence": 8},
            "train": {"steps": 8, "global_batch": 2, "micro_batch": 1, "eval_every": 1} | train,
            "checkpoint": {"every": 3, "keep": 1, "keep_best": True},
            "trace": {"steps": 0},
        }
    )
    (folder / "config.toml").write_text(config.to_toml())
    made = Trainer(config, cast(Any, world), model_of(config), folder, resume)
    made.pipeline.evaluate = lambda *_, **__: LOSSES[made.pipeline.steps - 1]  # type: ignore
    return made


def saved(folder: Path) -> list[int]:
    return sorted(int(path.name[-6:]) for path in (folder / "checkpoints").glob("step-*"))


def turn(trainer: Trainer) -> list[int]:
    """Runs one turn. Returns the checkpoints that are complete then."""
    trainer.turn()
    trainer.pipeline._parts.saves.complete()
    assert trainer._folder is not None
    return saved(trainer._folder)


def test_run_keeps_the_best_and_ends_without_a_lower_loss(tmp_path: Path) -> None:
    with dynmo.init(device="cpu") as world:
        first = trainer(world, tmp_path, patience=3)
        assert [turn(first) for _ in range(5)] == [[1], [2], [2], [4], [4]]
        assert first._log is not None
        first._log.close()  # it ends without a word
        again = trainer(world, tmp_path, resume=True, patience=3)
        assert again.first_step == 4
        result = again.run()
    assert (result.steps, result.interrupted) == (7, False)
    assert saved(tmp_path) == [4, 7]
    ends = [each for each in read(tmp_path / "events.jsonl") if isinstance(each, EndEvent)]
    assert [each.reason for each in ends] == ["stopped"]


def test_a_run_that_has_ended_early_has_nothing_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with dynmo.init(device="cpu") as world:
        assert trainer(world, tmp_path, patience=1).run().steps == 3
        before = (tmp_path / "events.jsonl").read_bytes()
        assert trainer(world, tmp_path, resume=True, patience=1).run().steps == 3
        assert "train.patience = 1: nothing is left to train" in caplog.text
        assert (tmp_path / "events.jsonl").read_bytes() == before
        assert trainer(world, tmp_path, resume=True).run().steps == 8


def test_a_newcomer_makes_no_evaluation_that_the_others_have_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for them for ever."""
    with dynmo.init(device="cpu") as world:
        first = trainer(world, tmp_path)
        turn(first)
        assert first._log is not None
        first._log.close()
        first._log, first._evaluated = None, 0  # as in a process that has just started
        monkeypatch.setattr(first.pipeline, "join", lambda stopping: True)
        assert first.join(lambda: False)
        assert first._must_evaluate
        assert first._evaluated == first.pipeline.steps == 1
        assert first._log is not None
        first._log.close()


def test_a_run_resumes_from_before_its_first_evaluation(tmp_path: Path) -> None:
    with dynmo.init(device="cpu") as world:
        first = trainer(world, tmp_path, eval_every=4)
        assert [turn(first) for _ in range(3)] == [[], [], []]
        first.pipeline.adapt()  # the next turn begins
        first.pipeline._parts.saves.complete()
        assert first._log is not None
        first._log.close()
        again = trainer(world, tmp_path, resume=True, eval_every=4)
        assert again.first_step == 3
        assert again._lowest == Lowest()
        again.run()
    assert again._lowest == Lowest(8, LOSSES[7])


def test_best_stays_if_time_ran_out_before_its_evaluation(tmp_path: Path) -> None:
    with dynmo.init(device="cpu") as world:
        first = trainer(world, tmp_path, steps=3, eval_every=2)
        turn(first)
        inputs, targets, _ = first._data.train(1)
        assert first.pipeline.step(inputs, targets, stop=True).stop
        assert saved(tmp_path) == [2]
        assert first._log is not None
        first._log.close()
        trainer(world, tmp_path, resume=True, steps=3, eval_every=2).run()
    assert (tmp_path / "checkpoints" / "best").read_text() == "step-000002"
    assert saved(tmp_path) == [2, 3]


def test_lowest_loss_is_exact_as_json() -> None:
    assert Lowest(**json.loads(json.dumps(vars(Lowest()), allow_nan=False))) == Lowest()
    lowest = Lowest().after(3, 0.1 + 0.2)
    assert Lowest(**json.loads(json.dumps(vars(lowest)))) == lowest


@pytest.mark.parametrize(
    "section", [{"train": {"patience": 2}}, {"checkpoint": {"keep_best": True}}]
)
def test_held_out_losses_are_needed(section: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"set train.eval_every"):
        parse(section)


def test_held_out_data_are_needed() -> None:
    with pytest.raises(ConfigError, match=r"train.eval_every needs held-out data"):
        parse({"train": {"eval_every": 2}, "data": {"held_out": 0}})
