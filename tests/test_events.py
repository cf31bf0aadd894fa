"""The event log reads back exactly, also after an interrupted run."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynmo.change_events import (
    ChangeEvent,
    GrowEvent,
    RebalanceEvent,
    RebalanceResultEvent,
    RecoverEvent,
    ReleaseEvent,
    RepackEvent,
    ReshapeEvent,
    ResizeEvent,
    ScheduleEvent,
    SlowRankEvent,
    SpeedsEvent,
    TokensEvent,
)
from dynmo.errors import InputError, RunError
from dynmo.event_log import EventLog, from_json, read, to_json
from dynmo.events import (
    CheckpointEvent,
    DataEvent,
    EndEvent,
    EvalEvent,
    Event,
    FaultEvent,
    HeldOutEvent,
    NotFiniteEvent,
    PostValidationEvent,
    RollbackEvent,
    SavesEvent,
    SkippedEvent,
    StepResult,
)
from tests.full_disk import files_up_to

ALL: list[Event] = [
    StepResult(0, 0.1 + 0.2, 1e5 / 3, 0.25, math.pi, 1e-300, None, 3e-4, (4, 4), 2, time=1.5),
    DataEvent(0, 0.125, 512, 24, 3, time=2.0),
    SkippedEvent(0, 65536.0, 32768.0, time=2.25),
    NotFiniteEvent(0, "loss nan", "output", 3, 1, 2, 10, time=2.3),
    SavesEvent(0, "saves to saved every 5 steps", time=2.3),
    HeldOutEvent(0, "3 samples of jsonl:a.jsonl", time=2.4),
    EvalEvent(0, 5e-324, time=2.5),
    TokensEvent(10, "early_exit", (5, 8), {"exited": [0.25, 0.5]}, time=1.0),
    ChangeEvent(1, "freezing", (0, 1), "froze layers 0 to 1", time=2.75),
    RebalanceEvent(1, 1, (4, 4), (6, 2), 123456789, 0.01, -0.0, "exact: é\n", 0.2, 0.3, time=3.0),
    SpeedsEvent(1, (1.0, 0.5), time=3.125),
    SlowRankEvent(1, 3, 2.0, "b", 2, time=3.2),
    ScheduleEvent(1, "zb-auto", 0.0625, time=3.25),
    RebalanceResultEvent(7, 1, 1 / 3, time=3.5),
    ReshapeEvent(7, (4, 1), (2, 2), (9, 9), 1 << 33, 0.25, time=3.75),
    RepackEvent(
        7, 2, 4, 2, (4, 1), (2, 1), (9, 9), 1 << 33, 0.25, 1 / 3, "why", ("a:1",), time=3.5
    ),
    GrowEvent(
        7, 3, 2, 3, (2, 1), (3, 1), (6, 6), 9, 0.25, None, "planned", ("a:3",), 0.1, time=3.5
    ),
    RecoverEvent(6, ("a:1",), "lost rank 1", 0.5, 1, 4, 3, (2, 2), (3, 1), (6, 6, 6), time=3.6),
    ReleaseEvent(7, "launcher", "node n3 of job 7", 1, 0.5, time=3.75),
    FaultEvent(7, "a newcomer is gone", time=3.75),
    RollbackEvent(7, "clipped", 0.1 / 3, time=3.75),
    PostValidationEvent(7, False, "6 of the last 20 steps were taken back", time=3.75),
    CheckpointEvent(7, "runs/a/checkpoints/step-000008", 1 << 40, 0.5, time=4.0),
    EndEvent(8, 1.797e308, "ab", 60.0, "done", 0.1, 1 / 3, 5e-324, buffers_digest="cd", time=5.0),
]


def write(path: Path, events: list[Event]) -> None:
    log = EventLog(path)
    for event in events:
        log.write(event)
    log.close()


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, ALL)
    assert list(read(path)) == ALL
    lines = path.read_text().splitlines()
    assert " ".join(json.loads(line)["event"] for line in lines) == (
        "step data skipped not_finite saves held_out eval tokens change rebalance speeds "
        "slow_rank schedule rebalance_result reshape repack grow recover release fault rollback "
        "post_validation checkpoint end"
    )
    moved = json.loads(lines[9])
    assert (moved["from"], moved["to"]) == ([4, 4], [6, 2]), "the words of the contract"
    assert "source" not in moved


@given(
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(allow_nan=False, allow_infinity=False),
)
def test_floats_are_exact(loss: float, seconds: float) -> None:
    event = EndEvent(1, loss, "", seconds, "done", time=seconds)
    back = from_json(json.loads(json.dumps(to_json(event))))
    assert isinstance(back, EndEvent)
    assert (back.loss.hex(), back.seconds.hex()) == (loss.hex(), seconds.hex())


def test_torn_last_line_is_dropped(tmp_path: Path) -> None:
    """A reader ignores a torn last line.

    A resumed run removes the torn line before it writes its first event.
    """
    path = tmp_path / "events.jsonl"
    write(path, ALL[:3])
    whole = path.read_bytes()
    for cut in range(1, len(json.dumps(to_json(ALL[2])))):
        path.write_bytes(whole[:-1][: -cut or None])
        assert list(read(path)) == ALL[:2]
    write(path, ALL[3:])
    assert list(read(path)) == ALL[:2] + ALL[3:]
    path.write_bytes(b'{"event": "st')
    assert list(read(path)) == []
    write(path, ALL)
    write(path, ALL)
    assert list(read(path)) == ALL + ALL


def test_last_line_without_newline_is_an_event(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, ALL)
    path.write_bytes(path.read_bytes()[:-1])
    assert list(read(path)) == ALL


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("{", ":2: "),
        ("[]", ":2: "),
        ('{"event": "party"}', ":2: .*'party'"),
        ('{"event": "eval", "step": 1, "time": 1.0}', ":2: .*'eval' .*'loss'"),
        ('{"step": 1}', ":2: .*None"),
        (
            '{"event": "eval", "step": 1, "time": 1.0, "loss": []}',
            ":2: .*'eval' has a wrong 'loss'",
        ),
        ('{"event": "eval", "step": "a", "time": 1.0, "loss": 1}', ":2: .* wrong 'step': Input sh"),
    ],
)
def test_bad_line_is_named_in_the_error(tmp_path: Path, line: str, match: str) -> None:
    path = tmp_path / "events.jsonl"
    first = json.dumps(to_json(ALL[0]))
    path.write_text(f"{first}\n{line}\n{first}\n")
    with pytest.raises(InputError, match=match):
        list(read(path))


def test_later_versions_may_add_keys() -> None:
    assert from_json({**to_json(ALL[1]), "new": 1}) == ALL[1]


def test_missing_keys_of_earlier_versions_get_defaults() -> None:
    missing = {"measure_seconds": 0.0, "decide_seconds": 0.0, "move_seconds": 0.0}
    record = to_json(ALL[-1])
    for key in (*missing, "buffers_digest"):
        del record[key]
    end = cast(EndEvent, ALL[-1])
    assert from_json(record) == dataclasses.replace(end, buffers_digest=None, **missing)


def test_every_event_type_is_tested() -> None:
    kinds = {*Event.__subclasses__(), *ResizeEvent.__subclasses__()} - {ResizeEvent}
    assert {type(event) for event in ALL} == kinds
    assert all(dataclasses.is_dataclass(event) for event in ALL)


def test_each_event_is_flushed(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.write(ALL[0])
    assert list(read(tmp_path / "events.jsonl")) == ALL[:1]
    log.close()


def test_write_to_a_full_disk_is_one_error(tmp_path: Path) -> None:
    """Earlier events read back, and closing the log raises no second error."""
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.write(ALL[0])
    with files_up_to(path.stat().st_size + 10), pytest.raises(RunError) as caught:
        log.write(ALL[1])
    log.close()
    assert str(caught.value).startswith(f"{path} cannot be written")
    assert list(read(path)) == ALL[:1]
    with pytest.raises(InputError, match=re.escape(str(tmp_path))):
        EventLog(tmp_path)
