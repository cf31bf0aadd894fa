"""The batch of a step, as a pure function of (seed, step).

It needs no state in checkpoints, resumes at any step, and gives every rank the same batch without
communication. The sequences and their order are the same for any split into microbatches, replicas
or stages. `order.py` decides which sequences a batch has.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynmo.data.corpus import Corpus
from dynmo.data.order import Order, windows_of


def windows_in(sequence: int, length: int, held_out: int | None = None) -> tuple[int, int]:
    """Returns the windows of a corpus and of a held-out one, by their tokens. None has none."""
    if held_out is None:
        return windows_of(length, sequence), 0
    own = windows_of(held_out, sequence, "data.held_out", fewest=1)
    return windows_of(length, sequence, fewest=1), own


class Batches:
    """Batches of sequences, in microbatches. The other arguments are those of `Order`.

    Args:
        shifted: Whether the target of a token is the next token. Otherwise it is the token itself,
            as the losses of transformers have it.
        held_out: What is held out: a share of the corpus, or a text of its own.
    """

    def __init__(
        self,
        corpus: Corpus,
        sequence: int,
        global_batch: int,
        micro_batch: int,
        seed: int,
        shuffle: str = "windows",
        shifted: bool = True,
        held_out: float | Corpus | None = None,
    ) -> None:
        self._corpus, self._sequence, self._micro_batch = corpus, sequence, micro_batch
        self._shifted = shifted
        share = held_out if isinstance(held_out, float | int) else None
        self._own = None if isinstance(held_out, float | int) else held_out
        length = None if self._own is None else len(self._own)
        windows = windows_in(sequence, len(corpus), length)
        self._order = Order(windows[0], global_batch, micro_batch, seed, shuffle, share, windows[1])
        self.windows, self.held_out_windows = self._order.windows, self._order.held_out_windows

    def train(self, step: int) -> tuple[Tensor, Tensor]:
        """Return (inputs, targets), int64 [microbatches, micro_batch, sequence].

        They are those of all replicas in order.
        """
        return self._split(self._rows(self._order.train(step), shift=0))

    def held_out(self, index: int) -> tuple[Tensor, Tensor]:
        """Return (inputs, targets) of one microbatch to evaluate on.

        Both are int64 [micro_batch, sequence]. The first window follows the last.
        """
        return self._split(self._rows(self._order.held_out(index), shift=1))

    def _rows(self, windows: NDArray[np.int64], shift: int) -> NDArray[np.int64]:
        length = self._sequence + 1
        rows = np.stack([self._window(each, shift, length) for each in windows.ravel().tolist()])
        return rows.reshape(*windows.shape, length).astype(np.int64)

    def _window(self, number: int, shift: int, length: int) -> NDArray[np.int64]:
        corpus = self._corpus
        if number < 0:
            assert self._own is not None
            corpus, number = self._own, -1 - number
        start = number * self._sequence + shift
        return corpus[start : start + length]

    def _split(self, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        tokens = torch.from_numpy(rows)
        inputs = tokens[..., :-1].contiguous()
        return inputs, tokens[..., 1:].contiguous() if self._shifted else inputs
