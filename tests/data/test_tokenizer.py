"""Text becomes the tokens of the tokenizer in a model's folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from dynmo.data import tokenizer as tokenizers
from dynmo.data.corpus import open_corpus
from dynmo.data.tokenizer import has_tokenizer, load_tokenizer, tokens_of
from dynmo.errors import ConfigError

TEXT = "def über():\n    return '€'\n"


def tokens(text: bytes, folder: Path, vocab: int = 300) -> list[int]:
    return tokens_of(np.frombuffer(text, np.uint8), load_tokenizer(folder, vocab)).tolist()


@pytest.fixture
def copied(small_llama: Path, tmp_path: Path) -> Path:
    return shutil.copytree(small_llama, tmp_path / "copied")


def test_tokens_are_those_of_transformers(small_llama: Path) -> None:
    wanted = AutoTokenizer.from_pretrained(small_llama)(TEXT)["input_ids"]
    assert tokens(TEXT.encode(), small_llama) == wanted


def test_a_zero_byte_ends_a_document(small_llama: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(small_llama)
    first, second = (tokenizer(text)["input_ids"] for text in ("import os\n", "x = 3"))
    end = [tokenizer.eos_token_id]
    assert tokens(b"import os\n\0x = 3\0", small_llama) == [*first, *end, *second, *end]


@pytest.mark.parametrize("piece", [1, 7, 40])
def test_pieces_of_a_text_cut_no_character(
    small_llama: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(tokenizers, "_PIECE", piece)
    text = 3 * TEXT + "no line's end €"
    tokenizer: Any = AutoTokenizer.from_pretrained(small_llama)
    assert tokenizer.decode(tokens(text.encode(), small_llama)) == text


def test_bytes_that_are_no_text_become_tokens(small_llama: Path) -> None:
    assert tokens(b"\xff\xfe", small_llama) == tokens("\ufffd\ufffd".encode(), small_llama)


def test_text_of_a_file_is_read(small_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text(TEXT)
    corpus = open_corpus(f"file:{tmp_path / 'text'}")
    assert tokens_of(corpus, load_tokenizer(small_llama, 300)).tolist() == tokens(
        TEXT.encode(), small_llama
    )


def test_truncation_of_a_tokenizer_is_left_out(copied: Path) -> None:
    file = copied / "tokenizer.json"
    known = json.loads(file.read_text())
    cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    file.write_text(json.dumps({**known, "truncation": cut}))
    assert len(tokens(TEXT.encode(), copied)) > 2


def test_a_folder_without_tokenizer_is_recognised(copied: Path) -> None:
    assert has_tokenizer(copied)
    for file in copied.glob("tokenizer*"):
        file.unlink()
    assert not has_tokenizer(copied)


def test_a_tokenizer_of_another_model_is_refused(small_llama: Path) -> None:
    with pytest.raises(ConfigError, match=r"a tokenizer that does not match: its ids go to 299"):
        load_tokenizer(small_llama, 299)


def test_a_tokenizer_without_its_files_is_refused(copied: Path) -> None:
    (copied / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=rf"the tokenizer of {copied} cannot be loaded: "):
        load_tokenizer(copied, 300)
    (copied / "tokenizer.json").unlink()
    (copied / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    with pytest.raises(ConfigError, match="has no tokens"):
        load_tokenizer(copied, 300)
