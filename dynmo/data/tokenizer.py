"""Text as the tokens of a tokenizer of transformers.

A zero byte ends a document, as in the text "stdlib". The end-of-text token stands for it.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynmo.data.corpus import SEPARATOR, Corpus
from dynmo.errors import ConfigError, one_line

# transformers makes an empty tokenizer of a folder that has none of these.
_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tekken.json",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
)
_PIECE = 1 << 20


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _FILES)


def load_tokenizer(folder: Path, vocab: int, trust_remote_code: bool = False) -> Any:
    """Loads the tokenizer of a model's folder.

    Args:
        vocab: Number of tokens of the model.
        trust_remote_code: Whether to run Python code that the folder has.

    Raises:
        ConfigError: The tokenizer cannot be loaded, or it is not that of the model.
    """
    from transformers import AutoTokenizer  # takes seconds, and most runs have no tokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # the tokenizers library raises plain exceptions
        said = one_line(str(error)) or type(error).__name__
        raise ConfigError(f"the tokenizer of {folder} cannot be loaded: {said}") from None
    ids: dict[str, int] = tokenizer.get_vocab()
    if not ids.keys() - set(tokenizer.all_special_tokens):
        raise ConfigError(
            f"the tokenizer of {folder} has no tokens; add the files of its vocabulary"
        )
    if max(ids.values()) >= vocab:
        raise ConfigError(
            f"{folder} has a tokenizer that does not match: its ids go to {max(ids.values())}, and "
            f"the model has {vocab} tokens; use the tokenizer that the model was trained with"
        )
    return tokenizer


def tokens_of(corpus: Corpus, tokenizer: Any) -> NDArray[np.int32]:
    """Returns the token ids of a text."""
    end: int | None = tokenizer.eos_token_id
    pieces = list[NDArray[np.int32]]()
    for text in _pieces(corpus):
        documents = text.split(SEPARATOR.decode())
        rows = _encoded(documents, tokenizer)
        ended = [[*row, end] if end is not None else row for row in rows[:-1]]
        pieces.append(np.fromiter(chain(*ended, rows[-1]), np.int32))
    return np.concatenate(pieces)


def _encoded(texts: list[str], tokenizer: Any) -> list[list[int]]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    # Twice as fast, since no offsets are made. The file of a tokenizer may ask for truncation.
    backend.no_truncation()
    backend.no_padding()
    return [each.ids for each in backend.encode_batch_fast(texts, add_special_tokens=False)]


def _pieces(corpus: Corpus) -> Iterator[str]:
    """Yields the text in pieces of a mebibyte, which end with a line if lines are shorter."""
    decoder, rest = codecs.getincrementaldecoder("utf-8")("replace"), ""
    for start in range(0, len(corpus), _PIECE):
        text = rest + decoder.decode(corpus[start : start + _PIECE].tobytes())
        end = text.rfind("\n") + 1 or len(text)
        rest = text[end:]
        yield text[:end]
    yield rest + decoder.decode(b"", final=True)
