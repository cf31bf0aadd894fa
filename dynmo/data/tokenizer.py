"""Text as the tokens of a tokenizer of transformers.

A zero byte ends a document, as in the text "stdlib". The end-of-text token stands for it.
"""

from __future__ import annotations

import codecs
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from dynmo.activity import ACTIVITY
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
_Token = TypeVar("_Token")
_HEAD = 4096  # letters in which special tokens are looked for
_LETTERS = 16  # of a long token


def shared_start(one: Sequence[object], other: Sequence[object]) -> int:
    """Returns the length of what both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


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


class SpecialTokens:
    """The ids that a tokenizer adds around a text, which a text may have already.

    Args:
        tokenizer: A tokenizer of transformers.

    Attributes:
        first: Those before a text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added, plain = self._encode("a", special=True), self.plain("a")
        at = next((i for i in range(len(added)) if added[i : i + len(plain)] == plain), len(added))
        self.first, self._last = added[:at], added[at + len(plain) :]

    def whole(self, text: str, longest: int | None = None) -> list[int]:
        """Returns the ids of a text that is a row.

        Args:
            longest: Ids that are needed. Those behind them may be others. None means all.
        """
        ids = self.begun(text, longest)
        there = next((n for n in range(len(self._last), 0, -1) if ids[-n:] == self._last[:n]), 0)
        return ids + self._last[there:]

    def begun(self, text: str, longest: int | None = None) -> list[int]:
        """Returns the ids of a text that others follow."""
        ids = self.plain(text, longest)
        return self.first[: len(self.first) - self._there(ids)] + ids

    def following(self, text: str, longest: int | None = None) -> list[int]:
        """Returns the ids of a text that follows another one."""
        ids = self.plain(text, longest)
        return ids[self._there(ids) :]

    def are_in(self, text: str) -> bool:
        """Whether a text has an id of a beginning or an end. Only its start is looked at."""
        known = {self._tokenizer.bos_token_id, self._tokenizer.eos_token_id} - {None}
        return not known.isdisjoint(self.plain(text[:_HEAD]))

    def plain(self, text: str, longest: int | None = None) -> list[int]:
        """Returns the ids of a text alone. Of a long text only a part is read."""
        return _begun(text, longest, partial(self._encode, special=False))

    def placed(self, text: str, longest: int, places: Sequence[int]) -> tuple[list[int], list[int]]:
        """Returns the ids of a text alone, and how many of them begin before each place in it."""
        if self._tokenizer.is_fast:
            found = _begun(text, longest, self._encode_placed)
            starts = [start for _, start in found]
            return [each for each, _ in found], [bisect_left(starts, place) for place in places]
        ids = self.plain(text, longest)
        parts = (self.plain(text[:place], longest) for place in places)
        return ids, [shared_start(ids, part) for part in parts]

    def _there(self, ids: list[int]) -> int:
        """Returns how many of the ids before a text are there already."""
        fitting = range(len(self.first), 0, -1)
        return next((n for n in fitting if ids[:n] == self.first[-n:]), 0)

    def _encode(self, text: str, special: bool) -> list[int]:
        return self._tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]

    def _encode_placed(self, text: str) -> list[tuple[int, int]]:
        """Returns each id, and where it begins in the text."""
        found = self._tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        starts = (start for start, _ in found["offset_mapping"])
        return list(zip(found["input_ids"], starts, strict=True))


def _begun(text: str, longest: int | None, encode: Callable[[str], list[_Token]]) -> list[_Token]:
    """Encodes so much of a text that its first ids are right.

    Ids change near a cut. So a part is long enough if another of twice its length has the same
    first ids.
    """
    if longest is None or len(text) <= 2 * (letters := _HEAD + _LETTERS * longest):
        return encode(text)
    ids = encode(text[:letters])
    while letters < len(text):
        letters *= 2
        before, ids = ids[:longest], encode(text[:letters])
        if len(before) == longest and ids[:longest] == before:
            break
    return ids


def tokens_of(corpus: Corpus, tokenizer: Any, source: str = "a text") -> NDArray[np.int32]:
    """Returns the token ids of a text. Ranks that wait are told its source."""
    end: int | None = tokenizer.eos_token_id
    pieces = list[NDArray[np.int32]]()
    for number, text in enumerate(_pieces(corpus)):
        ACTIVITY.progress(f"tokenises {source}", min(number * _PIECE, len(corpus)), len(corpus))
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
