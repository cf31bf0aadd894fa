"""Tokens of a file, and what files look like that are no plain text."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import sqlite3
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from dynmo.config import parse
from dynmo.data.batches import Batches
from dynmo.data.corpus import DTYPES, TokenFile, kind_of
from dynmo.errors import ConfigError, InputError
from dynmo.train.setup import warnings_of


def write(path: Path, tokens: list[int], dtype: str = "uint16", vocab: object = 100) -> Path:
    np.array(tokens, dtype).tofile(path)
    Path(f"{path}.json").write_text(json.dumps({"dtype": dtype, "vocab": vocab}))
    return path


@given(
    tokens=st.lists(st.integers(0, 99), min_size=1, max_size=20),
    dtype=st.sampled_from(DTYPES),
    start=st.integers(0, 20),
    length=st.integers(0, 20),
)
def test_any_slice_is_that_of_the_list(
    tmp_path_factory: pytest.TempPathFactory, tokens: list[int], dtype: str, start: int, length: int
) -> None:
    found = TokenFile(write(tmp_path_factory.mktemp("tokens") / "a.bin", tokens, dtype))
    assert len(found) == len(tokens)
    assert found[start : start + length].tolist() == tokens[start : start + length]


def test_batches_are_those_of_the_array(tmp_path: Path) -> None:
    tokens = [number * 7 % 100 for number in range(90)]
    plain = Batches(np.array(tokens), 4, 4, 2, seed=3)
    read = Batches(TokenFile(write(tmp_path / "a.bin", tokens)), 4, 4, 2, seed=3)
    for one, other in zip(plain.train(2), read.train(2), strict=True):
        assert one.equal(other)


def test_token_outside_the_vocabulary_is_named(tmp_path: Path) -> None:
    found = TokenFile(write(tmp_path / "a.bin", [1, 2, 100]))
    assert found[:2].tolist() == [1, 2]
    with pytest.raises(ConfigError, match="has the token 100, and vocab = 100"):
        found[1:]


def test_file_that_is_cut_off_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.bin", [1] * 8)
    found = TokenFile(path)
    np.array([1], "uint16").tofile(path)
    with pytest.raises(ConfigError, match=r'"tokens:.*a\.bin": has been cut off'):
        found[:]


@pytest.mark.parametrize(
    ("sidecar", "says"),
    [
        (None, r'a.bin.json, such as .*"vocab": 32000}: cannot be read: No such file'),
        ("{", "not JSON"),
        ("[]", "must be like"),
        ('{"dtype": "float32", "vocab": 9}', 'a.bin.json: dtype = "float32": must be'),
        ('{"dtype": "uint16"}', "a.bin.json: vocab: missing"),
        ('{"dtype": "uint16", "vocab": 0}', "a.bin.json: vocab = 0: must be"),
        ('{"dtype": "uint32", "vocab": 9}', "has 6 bytes, no multiple of the 4 of uint32"),
    ],
)
def test_wrong_sidecar_is_refused(tmp_path: Path, sidecar: str | None, says: str) -> None:
    path = write(tmp_path / "a.bin", [1, 2, 3])
    beside = Path(f"{path}.json")
    beside.unlink()
    if sidecar is not None:
        beside.write_text(sidecar)
    with pytest.raises(InputError, match=says):
        TokenFile(path)


ROWS = [{"text": "one"}, {"text": "two"}]
TENSORS = {"w": torch.zeros(3)}


def _zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a.txt", "text")


def _tar(path: Path) -> None:
    with tarfile.open(path, "w") as file:
        file.addfile(tarfile.TarInfo("a.txt"), io.BytesIO())


def _database(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("create table a (b)")
    connection.close()


def _text(text: str, encoding: str = "utf-8") -> Callable[[Path], object]:
    return lambda path: path.write_text(text, encoding)


def _bytes(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


STRUCTURED: dict[str, tuple[Callable[[Path], object], str]] = {
    "lines": (_text("".join(json.dumps(row) + "\n" for row in ROWS)), "JSON lines"),
    "one line": (_text(json.dumps(ROWS[0]) + "\n"), "JSON lines"),
    "json": (_text(json.dumps(ROWS, indent=1)), "a JSON file"),
    "long json": (_text(json.dumps({"text": "a" * 99_999})), "a JSON file"),
    "torch": (lambda path: torch.save(TENSORS, path), "a torch file"),
    "old torch": (
        lambda path: torch.save(TENSORS, path, _use_new_zipfile_serialization=False),
        "a torch file",
    ),
    "pickle": (_bytes(pickle.dumps(ROWS)), "a Python pickle"),
    "numpy": (lambda path: np.save(path.open("wb"), np.zeros(3)), "a numpy array"),
    "npz": (lambda path: np.savez(path.open("wb"), np.zeros(3)), "a numpy archive"),
    "safetensors": (lambda path: save_file(TENSORS, path), "a safetensors file"),
    "zip": (_zip, "a zip file"),
    "tar": (_tar, "a tar file"),
    "gzip": (_bytes(gzip.compress(b"text")), "a gzip file"),
    "bzip2": (_bytes(bz2.compress(b"text")), "a bzip2 file"),
    "xz": (_bytes(lzma.compress(b"text")), "an xz file"),
    "sqlite": (_database, "an SQLite database"),
    "parquet": (_bytes(b"PAR1\x15\x04"), "a parquet file"),
    "tokens": (_bytes(np.arange(1000, dtype=np.uint16).tobytes()), "binary data"),
    "UTF-16": (_text("a text", "utf-16"), "text in UTF-16"),
}
PLAIN = {
    "prose": "It was a dark night.\n",
    "code": "{ return 1; }\n",
    "wiki": "[[A link]] and more.\n",
    "a list": "[1] A footnote.\n[2] Another.\n",
    "numbers": "1\n2\n3\n",
    "strings": '"a"\n"b"\n',
    "separators": "a document of some words\0" * 9,
    "short": "a",
    "empty lines": "\n\n\n",
}


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("name", STRUCTURED)
def test_structured_file_is_named_in_a_warning(name: str, tmp_path: Path) -> None:
    write, kind = STRUCTURED[name]
    path = tmp_path / "data"
    write(path)
    seen = kind_of(path)
    assert seen is not None
    assert seen.startswith(kind)
    (line,) = warnings_of(parse({"data": {"source": f"file:{path}"}}))
    assert line.startswith(f'data.source = "file:{path}" looks like {kind}')
    assert "\n" not in line


@pytest.mark.parametrize("name", PLAIN)
def test_plain_text_has_no_warning(name: str, tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_text(PLAIN[name])
    assert kind_of(path) is None
    assert warnings_of(parse({"data": {"source": f"file:{path}"}})) == []


def test_missing_file_and_library_have_no_warning(tmp_path: Path) -> None:
    """Another check refuses what is missing. A pipe would block."""
    assert warnings_of(parse({"data": {"source": f"file:{tmp_path}/none"}})) == []
    assert warnings_of(parse({"data": {"source": f"file:{tmp_path}"}})) == []
    assert warnings_of(parse({})) == []
