"""What files look like that are no plain text."""

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
from safetensors.torch import save_file

from dynmo.config import parse
from dynmo.data.file_kind import kind_of
from dynmo.train.setup import warnings_of

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
