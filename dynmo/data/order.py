"""Which windows of the corpus a step reads, as a pure function of (seed, step): numbers only, so
that every rank may know them.

corpus   |--w0--|--w1--|--w2--|  ...  |--w(n-1)--|.|--h0--|--h1--|      each window is `sequence` tokens and the next one
          training: shuffled every epoch            held out: never trained on

shuffle "windows"   number i is window permutation(seed, i // n)[i % n]; step s takes the numbers s * global_batch and on. An epoch has
                    every window once, and a batch may span two epochs.
shuffle "batches"   the first epoch is as above, and cut to whole batches; later ones have the same batches in another order. So every
                    microbatch comes again, with the same sequences.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dynmo.errors import ConfigError

HELD_OUT_SHARE = 20  # one window of so many
HELD_OUT_MOST = 1024

Numbers = NDArray[np.int64]


class Order:
    """Windows of a corpus of `length` tokens. `windows` is how many are trained on,
    `held_out_windows` how many are not.

    Raises ConfigError if the corpus is too short for one of each, or for the batches that are to
    come again.
    """

    def __init__(
        self,
        length: int,
        sequence: int,
        global_batch: int,
        micro_batch: int,
        seed: int,
        shuffle: str = "windows",
    ) -> None:
        assert global_batch % micro_batch == 0, "the config checks this"
        # Two bytes more than the windows: the last target, and a gap that keeps the last training
        # target out of the held-out text.
        windows = (length - 2) // sequence
        if windows < 2:
            raise ConfigError(
                f"data.source has {length} bytes, model.sequence = {sequence} needs at least {2 * sequence + 2} "
                "(a window to train on and one held out); use a longer file or a shorter sequence"
            )
        self.held_out_windows = min(HELD_OUT_MOST, max(1, windows // HELD_OUT_SHARE))
        self.windows = windows - self.held_out_windows
        self._global_batch, self._micro_batch = global_batch, micro_batch
        self._batches = self.windows // global_batch if shuffle == "batches" else None
        if self._batches == 0:
            raise ConfigError(
                f'data.shuffle = "batches": data.source has {self.windows} windows to train on, fewer than train.global_batch = '
                f'{global_batch}; use a smaller batch or "windows"'
            )
        # Spread over the held-out text, and the same for every seed, so that losses of different
        # runs compare.
        self._held_out = self.windows + _permutation(self.held_out_windows, 0, 2**64 - 1)
        # Steps come in order: the current epoch's, and that of the first, where it says what the
        # batches are.
        self._permutation = lru_cache(maxsize=2)(
            lambda size, epoch: _permutation(size, seed, epoch)
        )

    def train(self, step: int) -> Numbers:
        """The windows of `step`: [microbatches, micro_batch], of all replicas in order."""
        assert step >= 0
        if self._batches is not None:
            epoch, place = divmod(step, self._batches)
            step = int(self._permutation(self._batches, epoch)[place]) if epoch else step
        numbers = np.arange(step * self._global_batch, (step + 1) * self._global_batch)
        epochs = numbers // self.windows
        order = [
            self._permutation(self.windows, int(epoch))[numbers[epochs == epoch] % self.windows]
            for epoch in np.unique(epochs)
        ]
        return np.concatenate(order).reshape(-1, self._micro_batch)

    def held_out(self, index: int) -> Numbers:
        """The windows of one microbatch to evaluate on: [micro_batch]; after the last window, the
        first."""
        assert index >= 0
        return self._held_out[
            np.arange(index * self._micro_batch, (index + 1) * self._micro_batch)
            % self.held_out_windows
        ]

    def repeats(self, steps: int) -> bool:
        """Whether, within so many steps, a microbatch comes again with the very same sequences,
        other than by rare chance."""
        if self._batches is not None:
            return steps > self._batches
        return self._micro_batch == 1 and steps * self._global_batch > self.windows


def _permutation(size: int, seed: int, epoch: int) -> Numbers:
    """By sorting raw random numbers: numpy keeps those of a bit generator from version to version,
    not what `permutation` makes of them."""
    random = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(size)
    return np.argsort(random, kind="stable")
