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


class Batches:
    """Batches of sequences, in microbatches. The other arguments are those of `Order`.

    Args:
        shifted: Whether the target of a token is the next token. Otherwise it is the token itself,
            as the losses of transformers have it.
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
    ) -> None:
        self._corpus, self._sequence, self._micro_batch = corpus, sequence, micro_batch
        self._shifted = shifted
        self._order = Order(
            windows_of(len(corpus), sequence), global_batch, micro_batch, seed, shuffle
        )
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
        starts = (windows * self._sequence + shift).ravel().tolist()
        rows = np.stack([self._corpus[start : start + length] for start in starts])
        return rows.reshape(*windows.shape, length).astype(np.int64)

    def _split(self, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        tokens = torch.from_numpy(rows)
        inputs = tokens[..., :-1].contiguous()
        return inputs, tokens[..., 1:].contiguous() if self._shifted else inputs
