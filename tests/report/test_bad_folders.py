"""A folder that is no sound run gives one line, or a page without what cannot be read."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dynmo.errors import InputError
from dynmo.report.passes import traced_rows
from dynmo.report.run_record import RunRecord
from tests.report.folders import make_run, steps_of


@pytest.mark.parametrize("key", ["seconds", "layers", "busy", "idle_ratio", "step"])
def test_value_of_a_wrong_type_is_named(tmp_path: Path, key: str) -> None:
    run = make_run(tmp_path / "run", steps_of(2))
    log = run.folder / "events.jsonl"
    lines = [json.loads(line) | {key: {"a": []}} for line in log.read_text().splitlines()]
    log.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    with pytest.raises(InputError, match=rf"events.jsonl:1: event 'step' has a wrong '{key}'"):
        RunRecord.read(run.folder)


@pytest.mark.parametrize(
    "change",
    [{"seconds": 0.0}, {"idle_ratio": math.nan}, {"busy": (math.inf, 1.0)}, {"layers": ()}],
)
def test_number_that_no_run_has_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    events = steps_of(2)
    events[1] = replace(events[1], **change)
    with pytest.raises(InputError, match="step 1 has a number that no run has"):
        make_run(tmp_path / "run", events)


@pytest.mark.parametrize(
    "change",
    [{"ts": None}, {"dur": [1]}, {"dur": float("inf")}, {"tid": []}, {"args": 3}, {"cat": ["F"]}],
)
def test_broken_trace_is_left_out(tmp_path: Path, change: dict[str, Any]) -> None:
    span = {"ph": "X", "cat": "F", "tid": 1, "ts": 1.0, "dur": 2.0}
    span |= {"args": {"step": 1, "microbatch": 0}} | change
    run = make_run(tmp_path / "run", steps_of(2))
    (run.folder / "trace.json").write_text(json.dumps({"traceEvents": [span]}))
    assert traced_rows(run) is None


def test_file_that_is_no_config_is_not_shown(tmp_path: Path) -> None:
    """The config of a folder of someone else may be a link to a key, or a pipe."""
    run = make_run(tmp_path / "run", steps_of(2))
    (tmp_path / "key").write_text("-----BEGIN PRIVATE KEY-----\nsecret\n")
    config = run.folder / "config.toml"
    config.unlink()
    config.symlink_to(tmp_path / "key")
    assert RunRecord.read(run.folder).config_text == ""
    config.unlink()
    os.mkfifo(config)
    assert RunRecord.read(run.folder).config_text == ""
