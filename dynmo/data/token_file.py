"""Tokens on disk: `tokens:PATH`, numbers one after another, read a window at a time.

PATH.json stands beside it and says how to read them:

    {"dtype": "uint16", "vocab": 32000}

dtype is uint8, uint16, uint32 or int32, little-endian. All tokens are below vocab.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from dynmo.data.corpus import file
from dynmo.errors import ConfigError
from dynmo.files import parse_json, read_text

DTYPES = ("uint8", "uint16", "uint32", "int32")


class TokenFile:
    """The tokens of a file.

    Args:
        path: The file. PATH.json is read, too.

    Attributes:
        vocab: A number that all tokens are below, as PATH.json says.

    Raises:
        ConfigError: A file is missing, or the two do not fit together.
    """

    def __init__(self, path: Path) -> None:
        self._source = f'data.source = "tokens:{path}"'
        dtype, self.vocab = self._read_kind(Path(f"{path}.json"))
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._bytes = file(path, "tokens")
        if len(self._bytes) % self._dtype.itemsize:
            raise ConfigError(
                f"{self._source}: has {len(self._bytes)} bytes, no multiple of the "
                f"{self._dtype.itemsize} of {dtype}; correct dtype in {path}.json"
            )

    def _read_kind(self, beside: Path) -> tuple[str, int]:
        try:
            told: object = parse_json(read_text(beside))
        except OSError as error:
            why = f"{beside} cannot be read ({error.strerror})"
            raise ConfigError(
                f'{self._source}: {why}; write it, such as {{"dtype": "uint16", "vocab": 32000}}'
            ) from None
        except ValueError as error:
            raise ConfigError(f"{self._source}: {beside} is no JSON ({error})") from None
        kind = cast("dict[str, object]", told) if isinstance(told, dict) else {}
        dtype, vocab = kind.get("dtype"), kind.get("vocab")
        if dtype not in DTYPES or type(vocab) is not int or vocab < 1:
            raise ConfigError(
                f"{self._source}: {beside} must have dtype ({', '.join(DTYPES)}) and vocab (a "
                "positive number)"
            )
        return cast(str, dtype), vocab

    def __len__(self) -> int:
        return len(self._bytes) // self._dtype.itemsize

    def __getitem__(self, part: slice) -> NDArray[np.integer]:
        """Raises ConfigError if the file has become shorter, or has a token outside of `vocab`."""
        start, stop, _ = part.indices(len(self))
        size = self._dtype.itemsize
        tokens = self._bytes[start * size : stop * size].view(self._dtype)
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self.vocab:
            wrong = tokens[(tokens < 0) | (tokens >= self.vocab)][0]
            raise ConfigError(
                f"{self._source}: has the token {wrong}, and vocab = {self.vocab} in its .json"
            )
        return tokens
