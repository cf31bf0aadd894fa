"""The windows that a step reads, as a pure function of (seed, step).

They are numbers only, so that every rank may know them. A window is `sequence` tokens of the corpus
and the next one, or a sample.

    corpus   |--w0--|--w1--|  ...  |--w(n-1)--|.|--h0--|--h1--|
              training: shuffled every epoch     held out: never trained on

shuffle "windows": number i is window permutation(seed, i // n)[i % n]. Step s takes the numbers
from s * global_batch on. An epoch has every window once, and a batch may span two epochs.

shuffle "batches": the first epoch is as above, cut to whole batches. Later epochs have the same
batches in another order. So every microbatch comes again, with the same sequences.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dynmo.errors import ConfigError

HELD_OUT_SHARE = 20  # one window of this many is held out
HELD_OUT_MOST = 1024

Numbers = NDArray[np.int64]


def windows_of(length: int, sequence: int) -> int:
    """Returns how many windows a corpus of `length` tokens has.

    Raises:
        ConfigError: There are fewer than two.
    """
    # The corpus needs two tokens more than the windows: the last target, and a gap. The gap keeps
    # the last training target out of the held-out text.
    windows = (length - 2) // sequence
    if windows < 2:
        raise ConfigError(
            f"data.source has {length} tokens, model.sequence = {sequence} needs at least "
            f"{2 * sequence + 2} (a window to train on and one held out); use a longer file or "
            "a shorter sequence"
        )
    return windows


class Order:
    """The order in which windows are read.

    Args:
        windows: How many there are, with those that are held out. At least two.
        global_batch: Sequences in a batch, over all replicas.
        micro_batch: Sequences in a microbatch.
        seed: Seed of the order.
        shuffle: "windows" or "batches".

    Raises:
        ConfigError: There are too few for the batches that come again.
    """

    def __init__(
        self,
        windows: int,
        global_batch: int,
        micro_batch: int,
        seed: int,
        shuffle: str = "windows",
    ) -> None:
        assert windows > 1
        assert global_batch % micro_batch == 0, "the config checks this"
        self.held_out_windows = min(HELD_OUT_MOST, max(1, windows // HELD_OUT_SHARE))
        self.windows = windows - self.held_out_windows
        self._global_batch, self._micro_batch = global_batch, micro_batch
        self._batches = self.windows // global_batch if shuffle == "batches" else None
        if self._batches == 0:
            raise ConfigError(
                f'data.shuffle = "batches": data.source has {self.windows} windows to train on, '
                f'fewer than train.global_batch = {global_batch}; use a smaller batch or "windows"'
            )
        # The windows are spread over the held-out text. They are the same for every seed, so that
        # losses of different runs compare.
        self._held_out = self.windows + permutation(self.held_out_windows, 0, 2**64 - 1)
        # Steps come in order, so two permutations are enough. One is that of the current epoch. The
        # other is that of the first epoch, which defines the batches.
        self._permutation = lru_cache(maxsize=2)(lambda size, epoch: permutation(size, seed, epoch))

    def train(self, step: int) -> Numbers:
        """Return the windows of a step, of all replicas: [microbatches, micro_batch]."""
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
        """Return the windows of a microbatch to evaluate on. The first follows the last."""
        assert index >= 0
        return self._held_out[
            np.arange(index * self._micro_batch, (index + 1) * self._micro_batch)
            % self.held_out_windows
        ]

    def steps(self, epochs: float) -> int:
        """Returns the number of steps in which each window came so many times, at least."""
        length = Fraction(str(epochs))  # as it is written: no rounding adds a step
        if self._batches is not None:
            return max(1, math.ceil(length * self._batches))
        return max(1, math.ceil(length * self.windows / self._global_batch))

    def repeats(self, steps: int) -> bool:
        """True if the very same microbatch comes again within this number of steps."""
        if self._batches is not None:
            return steps > self._batches
        return self._micro_batch == 1 and steps * self._global_batch > self.windows


def permutation(size: int, seed: int, epoch: int) -> Numbers:
    """Sort raw random numbers, which numpy keeps from version to version."""
    random = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(size)
    return np.argsort(random, kind="stable")


class StreamOrder:
    """The numbers of a stream, which has an order of its own. The arguments are those of `Order`.

    Args:
        held_out: The first numbers, which are held out.
    """

    def __init__(self, held_out: int, global_batch: int, micro_batch: int) -> None:
        self._held_out, self._global_batch, self._micro_batch = held_out, global_batch, micro_batch

    def train(self, step: int) -> Numbers:
        start = self._held_out + step * self._global_batch
        return np.arange(start, start + self._global_batch).reshape(-1, self._micro_batch)

    def held_out(self, index: int) -> Numbers:
        return (
            np.arange(index * self._micro_batch, (index + 1) * self._micro_batch) % self._held_out
        )
