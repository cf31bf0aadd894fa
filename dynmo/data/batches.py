"""The batch of a step, as a pure function of (seed, step).

Not a stream with a cursor: a function needs no state in checkpoints, resumes at any step, gives every rank the same batch without a
word between them, and gives the same sequences in the same order however they are split into microbatches, replicas or stages. A
rollback or a changed number of ranks can neither skip nor repeat data.

    corpus   |--w0--|--w1--|--w2--|  ...  |--w(n-1)--|.|--h0--|--h1--|      each window is `sequence` tokens and the next one
              training: shuffled every epoch            held out: never trained on

Step s takes the window numbers s * global_batch and on; number i is window permutation(seed, i // n)[i % n]. So an epoch has every
window once, and a batch may span two epochs.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynmo.data.corpus import Corpus
from dynmo.errors import ConfigError

HELD_OUT_SHARE = 20  # one window of so many
HELD_OUT_MOST = 1024


class Batches:
    """Batches of `global_batch` sequences of `sequence` tokens, in microbatches of `micro_batch`.

    `windows` is how many are trained on, `held_out_windows` how many are not. Raises ConfigError if the corpus is too short for one of
    each.
    """

    def __init__(self, corpus: Corpus, sequence: int, global_batch: int, micro_batch: int, seed: int) -> None:
        assert global_batch % micro_batch == 0, "the config checks this"
        # Two bytes more than the windows: the last target, and a gap that keeps the last training target out of the held-out text.
        windows = (len(corpus) - 2) // sequence
        if windows < 2:
            raise ConfigError(
                f"data.source has {len(corpus)} bytes, model.sequence = {sequence} needs at least {2 * sequence + 2} "
                "(a window to train on and one held out); use a longer file or a shorter sequence"
            )
        self.held_out_windows = min(HELD_OUT_MOST, max(1, windows // HELD_OUT_SHARE))
        self.windows = windows - self.held_out_windows
        self._corpus, self._sequence, self._seed = corpus, sequence, seed
        self._global_batch, self._micro_batch = global_batch, micro_batch
        # Spread over the held-out text, and the same for every seed, so that losses of different runs compare.
        self._held_out = self.windows + _permutation(self.held_out_windows, 0, 2**64 - 1)
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def train(self, step: int) -> tuple[Tensor, Tensor]:
        """(inputs, targets) of `step`: int64 tensors [microbatches, micro_batch, sequence], of all replicas in order."""
        assert step >= 0
        numbers = np.arange(step * self._global_batch, (step + 1) * self._global_batch)
        epochs = numbers // self.windows
        order = [self._permutation(int(epoch))[numbers[epochs == epoch] % self.windows] for epoch in np.unique(epochs)]
        rows = self._rows(np.concatenate(order), shift=0)
        return _split(rows.reshape(-1, self._micro_batch, self._sequence + 1))

    def held_out(self, index: int) -> tuple[Tensor, Tensor]:
        """(inputs, targets) of one microbatch to evaluate on: int64 [micro_batch, sequence]; after the last window, the first."""
        assert index >= 0
        numbers = np.arange(index * self._micro_batch, (index + 1) * self._micro_batch) % self.held_out_windows
        return _split(self._rows(self._held_out[numbers], shift=1))

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        if epoch != self._epoch:  # steps come in order, so the current epoch is enough to keep
            self._epoch, self._order = epoch, _permutation(self.windows, self._seed, epoch)
        return self._order

    def _rows(self, windows: NDArray[np.int64], shift: int) -> NDArray[np.int64]:
        at = windows[:, None] * self._sequence + np.arange(shift, self._sequence + 1 + shift)
        return self._corpus[at].astype(np.int64)


def _permutation(size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """By sorting raw random numbers: numpy keeps those of a bit generator from version to version, not what `permutation` makes of them."""
    random = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(size)
    return np.argsort(random, kind="stable")


def _split(rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    tokens = torch.from_numpy(rows)
    return tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous()
