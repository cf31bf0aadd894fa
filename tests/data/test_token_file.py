"""Tokens of a file, and the kind that its sidecar says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynmo.data.batches import Batches
from dynmo.data.token_file import DTYPES, TokenFile
from dynmo.errors import ConfigError


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
        (None, "a.bin.json cannot be read .No such file.*; write it"),
        ("{", "is no JSON"),
        ("[]", "must have dtype"),
        ('{"dtype": "float32", "vocab": 9}', "must have dtype"),
        ('{"dtype": "uint16"}', "and vocab"),
        ('{"dtype": "uint32", "vocab": 9}', "has 6 bytes, no multiple of the 4 of uint32"),
    ],
)
def test_wrong_sidecar_is_refused(tmp_path: Path, sidecar: str | None, says: str) -> None:
    path = write(tmp_path / "a.bin", [1, 2, 3])
    beside = Path(f"{path}.json")
    beside.unlink()
    if sidecar is not None:
        beside.write_text(sidecar)
    with pytest.raises(ConfigError, match=says):
        TokenFile(path)
