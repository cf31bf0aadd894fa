"""Records of decisions: written, read, and asked again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dynmo.config import parse
from dynmo.errors import InputError
from dynmo.plan.records import DecisionRecord, read_records
from dynmo.train.run_log import RunLog
from tests.plan.test_decide import asked

STAY = {"change": False, "remade": False}


def record() -> DecisionRecord:
    return replace(asked(), answer=STAY)


def test_record_that_is_damaged_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    path.write_text('{"problem": {}}\n')
    with pytest.raises(InputError, match="line 1 is no decision"):
        list(read_records(path))
    with pytest.raises(InputError, match="cannot be read"):
        list(read_records(tmp_path / "none"))
    text = record().to_text()
    path.write_text(text + "\n" + text[:100])
    assert list(read_records(path)) == [record()]


@pytest.mark.parametrize(
    "line", ['{"kind":"move","situation":{"step":4}}', '{"kind":"ranks","situation":{"st']
)
def test_records_of_an_earlier_version_are_named_so(tmp_path: Path, line: str) -> None:
    path = tmp_path / "decisions.jsonl"
    path.write_text(line)
    with pytest.raises(
        InputError, match=r"decisions.jsonl is of an earlier version of dynmo"
    ) as told:
        list(read_records(path))
    assert "\n" not in str(told.value)


def test_decisions_in_a_row_that_change_nothing_are_written_once(tmp_path: Path) -> None:
    """So a run of 2,000 steps writes less than a megabyte."""
    stay = record()
    move = replace(stay, answer={"change": True, "remade": False})
    mesh = replace(stay, rules=replace(stay.rules, kind="mesh"))
    log = RunLog(parse({}), tmp_path, None)
    for records in ([stay, mesh], [stay, mesh], [move], [stay, mesh], [stay]):
        log.record_decisions(records)
    log.close()
    assert list(read_records(tmp_path / "decisions.jsonl")) == [stay, mesh, move, stay]


def test_a_change_is_decided_again_from_its_record() -> None:
    decision = asked(is_measured=True).again()
    written = replace(asked(is_measured=True), answer=decision.answer)
    copy = DecisionRecord.from_text(written.to_text())
    assert copy.again().answer == copy.answer
    assert copy.answer["change"]
