"""The batch of a step, as a pure function of (seed, step).

Not a stream with a cursor: a function needs no state in checkpoints, resumes at any step, gives
every rank the same batch without a word between them, and gives the same sequences in the same
order however they are split into microbatches, replicas or stages. A rollback or a changed number
of ranks can neither skip nor repeat data. Which sequences these are, and when they come again:
`order.py`.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynmo.data.corpus import Corpus
from dynmo.data.order import Order


class Batches:
    """Batches of `global_batch` sequences of `sequence` tokens, in microbatches of `micro_batch`.

    `windows` is how many are trained on, `held_out_windows` how many are not. shuffle:
    `data.shuffle`. Raises ConfigError if the corpus is too short for one of each.
    """

    def __init__(
        self,
        corpus: Corpus,
        sequence: int,
        global_batch: int,
        micro_batch: int,
        seed: int,
        shuffle: str = "windows",
    ) -> None:
        self._corpus, self._sequence, self._micro_batch = corpus, sequence, micro_batch
        self._order = Order(len(corpus), sequence, global_batch, micro_batch, seed, shuffle)
        self.windows, self.held_out_windows = self._order.windows, self._order.held_out_windows

    def train(self, step: int) -> tuple[Tensor, Tensor]:
        """(inputs, targets) of `step`: int64 tensors [microbatches, micro_batch, sequence], of all
        replicas in order."""
        return _split(self._rows(self._order.train(step), shift=0))

    def held_out(self, index: int) -> tuple[Tensor, Tensor]:
        """(inputs, targets) of one microbatch to evaluate on: int64 [micro_batch, sequence]; after
        the last window, the first."""
        return _split(self._rows(self._order.held_out(index), shift=1))

    def _rows(self, windows: NDArray[np.int64], shift: int) -> NDArray[np.int64]:
        length = self._sequence + 1
        starts = (windows * self._sequence + shift).ravel().tolist()
        rows = np.stack([self._corpus[start : start + length] for start in starts])
        return rows.reshape(*windows.shape, length).astype(np.int64)


def _split(rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    tokens = torch.from_numpy(rows)
    return tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous()
