"""Records of files, read by number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynmo.data.records import BrokenSampleError, open_records
from dynmo.errors import ConfigError

ROWS = [{"text": "ab\nc"}, {"text": "ü"}, {"text": ""}, {"text": "last", "more": [1, None]}]


def write_lines(path: Path, lines: list[str]) -> str:
    path.write_text("\n".join(lines), encoding="utf-8", errors="surrogateescape")
    return f"jsonl:{path}"


def test_lines_are_read_in_any_order(tmp_path: Path) -> None:
    lines = [json.dumps(row, ensure_ascii=False) for row in ROWS]
    source = write_lines(tmp_path / "a.jsonl", ["", lines[0], *lines[1:3], "  ", lines[3]])
    records = open_records(source)
    assert len(records) == 4
    assert [records[at] for at in (3, 0, 2, 1)] == [ROWS[at] for at in (3, 0, 2, 1)]
    assert records.place(3) == f"{tmp_path}/a.jsonl:6"


@given(st.lists(st.dictionaries(st.text(max_size=3), st.text(max_size=5)), min_size=1, max_size=9))
def test_any_objects_come_back(
    tmp_path_factory: pytest.TempPathFactory, rows: list[object]
) -> None:
    path = tmp_path_factory.mktemp("rows") / "a.jsonl"
    records = open_records(write_lines(path, [json.dumps(row) for row in rows]))
    assert [records[at] for at in range(len(records))] == rows


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"a"\n', r"not a line of JSON \(Expecting ':' delimiter: column 5\)$"),
        ('"\udcff"', r"not a line of JSON \('utf-8' codec can't decode byte 0xff in position 1"),
        ("[1]", "a list, not a JSON"),
        ("[" * 50_000 + "]" * 50_000, "its JSON is nested too deep"),
    ],
)
def test_malformed_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    records = open_records(write_lines(tmp_path / "a.jsonl", ['{"text": "a"}', line]))
    assert records[0] == {"text": "a"}
    with pytest.raises(BrokenSampleError, match=rf"a\.jsonl:2: {says}"):
        records[1]


def test_file_that_is_cut_off_is_an_error(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", ['{"text": "a"}'] * 3)
    records = open_records(source)
    (tmp_path / "a.jsonl").write_text("{")
    with pytest.raises(ConfigError, match="has been cut off"):
        records[2]


@pytest.mark.parametrize(
    ("content", "says"), [(None, "cannot be read .No such file"), ("\n \n", "no records")]
)
def test_file_without_records_is_refused(tmp_path: Path, content: str | None, says: str) -> None:
    path = tmp_path / "a.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=says):
        open_records(f"jsonl:{path}")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_folder_of_a_relative_path_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as raised:
        open_records(f"{kind}:talk")
    assert str(raised.value) == (
        f'data.source = "{kind}:talk": cannot be read (No such file or directory in {tmp_path}; '
        "the path is relative to the folder where dynmo starts)"
    )


def test_parquet_rows_are_those_of_the_file(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    def write(rows: list[dict[str, Any]]) -> str:
        parquet.write_table(arrow.Table.from_pylist(rows), path, row_group_size=3)
        return f"parquet:{path}"

    path = tmp_path / "a.parquet"
    rows = [{"text": str(number), "turns": [number]} for number in range(10)]
    records = open_records(write(rows))
    assert len(records) == 10
    assert [records[at] for at in (9, 0, 3)] == [rows[at] for at in (9, 0, 3)]
    assert records.place(3) == f"{path}, item 3"
    assert open_records(write(rows[5:]))[0] == rows[5], "no cached rows of the earlier file"
    for content in (path.read_bytes().replace(b"PAR1", b"PAR2"), b"text"):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=f"{path}: cannot be loaded: "):
            open_records(f"parquet:{path}")
    path.unlink()
    with pytest.raises(ConfigError, match=r"cannot be read .No such file"):
        open_records(f"parquet:{path}")


def test_saved_dataset_of_hugging_face_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"text": str(number)} for number in range(5)]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    records = open_records(f"hf:{tmp_path}/saved")
    assert [records[at] for at in range(len(records))] == rows
    with pytest.raises(ConfigError, match="cannot be loaded"):
        open_records(f"hf:{tmp_path}/nothing")


def test_keys_that_arrow_adds_are_left_out(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")

    def row(key: str) -> dict[str, Any]:
        call = {"function": {"name": "f", "arguments": {key: ["x"]}}}
        tools = [{"name": "f", "parameters": {"properties": {key: {"type": "array"}}}}]
        return {"messages": [{"role": "assistant", "tool_calls": [call]}], "tools": tools}

    rows = [row("one"), row("other")]
    made = datasets.Dataset.from_list(rows)
    made.to_parquet(str(tmp_path / "rows.parquet"))
    assert made[0]["messages"][0]["tool_calls"][0]["function"]["arguments"]["other"] is None
    for source in (f"parquet:{tmp_path / 'rows.parquet'}", made):
        records = open_records(source)
        assert [records[at] for at in range(2)] == rows


class Squares:
    """Records that a program computes."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> object:
        return {"text": str(number**2)} if number < 2 else [number][number]


def a_number() -> int:
    return 3


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("file:text", 'data.source = "file:text": samples come from jsonl:PATH'),
        ("rows.jsonl", 'data.source = "rows.jsonl": samples come from'),
        (iter([{"text": "a"}]), "data.source is a list_iterator; give a sequence of records"),
        ({"train": [{"text": "a"}]}, "data.source is a dict; give .* one split of a dataset"),
    ],
)
def test_what_has_no_samples_is_refused(source: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        open_records(source)


def broken() -> object:
    raise OSError("the disk is gone")


def test_own_records_are_read_by_number() -> None:
    name = f"{__name__}:Squares"
    records = open_records(f"python:{name}")
    assert len(records) == 4
    assert [records[at] for at in (1, 0)] == [{"text": "1"}, {"text": "0"}]
    with pytest.raises(BrokenSampleError, match=f"{name}, item 2: raised IndexError"):
        records[2]


@pytest.mark.parametrize(
    ("function", "says"),
    [("a_number", "returned a int; it must return a sequence"), ("broken", "the disk is gone")],
)
def test_function_without_records_is_refused(function: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        open_records(f"python:{__name__}:{function}")
