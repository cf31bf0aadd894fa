"""Files of any content are read, or refused in one line. Nothing else is ever raised."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynmo import event_log
from dynmo.config import load
from dynmo.cost import costs_file
from dynmo.data.corpus import TokenFile, kind_of
from dynmo.data.records import BrokenSampleError, open_records
from dynmo.data.samples import Encoder
from dynmo.errors import InputError
from dynmo.models.huggingface.load import stored_in
from dynmo.plan import decide, workload


def records(path: Path, kind: str) -> None:
    source = open_records(f"{kind}:{path}")
    encoder = Encoder(None, 8, 300)
    for number in range(len(source)):
        with suppress(BrokenSampleError):
            encoder.encode(source[number], source.place(number))


def index(path: Path) -> None:
    path.rename(path.with_name("model.safetensors.index.json"))
    stored_in(path.parent)


def token_file(path: Path) -> None:
    path.rename(f"{path}.json")
    path.write_bytes(b"\0\0")
    TokenFile(path)


READERS: dict[str, Callable[[Path], object]] = {
    "config": load,
    "workload": workload.read,
    "costs": costs_file.read,
    "decisions": lambda path: list(decide.read_records(path)),
    "events": lambda path: list(event_log.read(path)),
    "jsonl": lambda path: records(path, "jsonl"),
    "parquet": lambda path: records(path, "parquet"),
    "tokens": token_file,
    "index": index,
    "weights": lambda path: stored_in(path.parent, path.name),
    "kind": kind_of,
}


KEYS = ("weight_map", "dtype", "vocab", "event", "step", "problem", "rules", "answer", "input_ids")
KEYS += ("labels", "text", "messages", "model", "train", "layers", "ranks", "f", "b", "w", "data")
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(KEYS),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(KEYS) | st.text(), inner),
)
ODD = (
    b"",
    b"\xef\xbb\xbf{}",
    b"\xff\xfe{\0}\0",
    b"[" * 100_000,
    b"x = " + b"[" * 100_000,
    b"a" + b".a" * 20_000 + b" = 1",
    b'{"weight_map": {"a": "../a"}}',
    b'{"weight_map": {"a": "' + b"a" * 5000 + b'"}}',
    b'{"event": "step", "a": "\\ud800"}',
    b'{"a":' * 500 + b"1" + b"}" * 500,
    b"1" * 5000,
    b"PAR1" + b"\0" * 20 + b"PAR1",
    b"\x10\0\0\0\0\0\0\0" + b'{"a":{"dtype":8}}',
)
contents = (
    st.binary(max_size=200)
    | st.sampled_from(ODD)
    | st.lists(values.map(lambda value: json.dumps(value).encode()), max_size=3).map(b"\n".join)
    | st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass"))
)


def check(reader: str, content: bytes) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        path.write_bytes(content)
        said = ""
        try:
            READERS[reader](path)
        except InputError as error:
            said = str(error)
        assert not said or (folder in said and "\n" not in said)


@pytest.mark.parametrize("reader", READERS)
def test_odd_files_are_read_or_named(reader: str) -> None:
    for content in ODD:
        check(reader, content)


@given(st.sampled_from(sorted(READERS)), contents)
def test_any_file_is_read_or_named(reader: str, content: bytes) -> None:
    check(reader, content)


@pytest.mark.matrix
@settings(max_examples=2000)
@given(st.sampled_from(sorted(READERS)), contents)
def test_many_files_are_read_or_named(reader: str, content: bytes) -> None:
    check(reader, content)


@pytest.mark.parametrize("reader", sorted(READERS.keys() - {"tokens", "index", "kind"}))
def test_pipe_is_refused(reader: str, tmp_path: Path) -> None:
    """Nobody writes to it, so a reader would wait for ever."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises((InputError, OSError), match=r"not a regular file|no regular file"):
        READERS[reader](tmp_path / "pipe")
