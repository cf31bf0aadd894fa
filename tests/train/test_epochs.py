"""`train.epochs`: a run's length in passes over its data."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from dynmo.config import Config, parse
from dynmo.data.order import Order
from dynmo.errors import ConfigError
from dynmo.train.setup import with_steps


def config(tmp_path: Path, **sections: Any) -> Config:
    """A run with 60 windows of 8 bytes, of which 3 are held out."""
    (tmp_path / "text").write_text("abcdefgh" * 60 + "ij")
    train = {"global_batch": 4, "micro_batch": 2} | sections.pop("train", {})
    data = {"source": f"file:{tmp_path / 'text'}"} | sections.pop("data", {})
    return parse({"model": {"sequence": 8}, "train": train, "data": data} | sections)


def test_steps_see_each_window_as_often_as_the_epochs_say() -> None:
    windows = Order(60, 4, 2, seed=0)
    steps = windows.steps(2)
    seen = [number for step in range(steps) for number in windows.train(step).ravel().tolist()]
    assert min(seen.count(number) for number in range(57)) == 2
    assert steps == 29, "the last batch begins in the second epoch"
    assert Order(60, 4, 2, seed=0, shuffle="batches").steps(2) == 2 * 14
    assert Order(1100, 100, 2, seed=0).steps(1.1) == 12
    assert Order(100, 95, 5, seed=0).steps(1.1) == 2, "no rounding adds a step"
    assert windows.steps(1e-9) == 1


def test_a_run_gets_the_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = config(tmp_path, train={"epochs": 2})
    with caplog.at_level(logging.WARNING):
        made = with_steps(given)
    assert caplog.messages == ["train.epochs = 2 with 57 samples: 29 steps"]
    assert (made.train.steps, made.train.epochs) == (29, None)
    assert with_steps(made) is made
    assert parse(given.model_dump()) == given


def test_options_are_checked_against_the_steps(tmp_path: Path) -> None:
    pruning = {"cases": ["pruning"], "pruning": {"end": 20}}
    assert with_steps(config(tmp_path, train={"epochs": 2}, dynamism=pruning)).train.steps == 29
    with pytest.raises(ConfigError, match=r"dynamism.pruning.end = 20: the run has 15 steps"):
        with_steps(config(tmp_path, train={"epochs": 1}, dynamism=pruning))


def test_two_lengths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train.epochs = 2 and train.steps = 5; give one"):
        config(tmp_path, train={"epochs": 2, "steps": 5})


def test_a_stream_is_refused(tmp_path: Path) -> None:
    stream = {"source": "hf:rows", "streaming": True}
    with pytest.raises(ConfigError, match=r'"hf:rows" is unknown .*; give train.steps'):
        with_steps(config(tmp_path, train={"epochs": 1}, data=stream))


def test_one_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one").write_text('{"text": "a"}\n')
    model = {"kind": "hf", "path": str(tmp_path), "sequence": 8}
    source = {"source": f"jsonl:{tmp_path / 'one'}"}
    with pytest.raises(ConfigError, match=r"data.source has one record; one to train on and one"):
        with_steps(config(tmp_path, train={"epochs": 1}, data=source, model=model))
