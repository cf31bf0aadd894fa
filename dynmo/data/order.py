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


def windows_of(length: int, sequence: int, key: str = "data.source", fewest: int = 2) -> int:
    """Returns how many windows a corpus of `length` tokens has.

    Args:
        length: Tokens of the corpus.
        sequence: Tokens of a window.
        key: The option that names the corpus, for messages.
        fewest: Windows that are needed. With two, one is held out.

    Raises:
        ConfigError: There are fewer.
    """
    # The corpus needs two tokens more than the windows: the last target, and a gap. The gap keeps
    # the last training target out of the held-out text.
    windows = (length - 2) // sequence
    if windows < fewest:
        what = " (a window to train on and one held out)" if fewest == 2 else ""
        raise ConfigError(
            f"{key} has {length} tokens, model.sequence = {sequence} needs at least "
            f"{fewest * sequence + 2}{what}; use a longer file or a shorter sequence"
        )
    return windows


def windows_in(sequence: int, length: int, held_out: int | None = None) -> tuple[int, int]:
    """Returns the windows of a corpus and of a held-out one, by their tokens. None has none."""
    if held_out is None:
        return windows_of(length, sequence), 0
    own = windows_of(held_out, sequence, "data.held_out", fewest=1)
    return windows_of(length, sequence, fewest=1), own


def held_out_of(windows: int, share: float | None) -> int:
    """Returns how many windows are held out. None is a twentieth, at most 1024. 0 is none."""
    if share is None:
        return min(HELD_OUT_MOST, max(1, windows // HELD_OUT_SHARE))
    return min(windows - 1, max(1, round(windows * share))) if share else 0


def held_out_text(source: object, count: int, unit: str) -> str:
    """Says what evaluations read: so many windows or samples of a source."""
    name = source if isinstance(source, str) else "the sequence"
    return f"{count:,} {unit} of {name}"


class Order:
    """The order in which windows are read.

    Args:
        windows: How many there are, with those that are held out. At least two.
        global_batch: Sequences in a batch, over all replicas.
        micro_batch: Sequences in a microbatch.
        seed: Seed of the order.
        shuffle: "windows" or "batches".
        share: Share of the windows that is held out. None is that of `held_out_of`.
        own: Windows of a held-out source. All others train then. Their numbers are -1, -2, ..

    Raises:
        ConfigError: There is one record only, or too few for the batches that come again.
    """

    def __init__(
        self,
        windows: int,
        global_batch: int,
        micro_batch: int,
        seed: int,
        shuffle: str = "windows",
        share: float | None = None,
        own: int = 0,
    ) -> None:
        if windows < 2 and not own and share != 0:
            raise ConfigError(
                "data.source has one record; one to train on and one held out are needed"
            )
        assert global_batch % micro_batch == 0, "the config checks this"
        self.held_out_windows = own or held_out_of(windows, share)
        self.windows = windows if own else windows - self.held_out_windows
        self._global_batch, self._micro_batch = global_batch, micro_batch
        self._batches = self.windows // global_batch if shuffle == "batches" else None
        if self._batches == 0:
            raise ConfigError(
                f'data.shuffle = "batches": data.source has {self.windows} windows to train on, '
                f'fewer than train.global_batch = {global_batch}; use a smaller batch or "windows"'
            )
        # The windows are spread over the held-out text. They are the same for every seed, so that
        # losses of different runs compare.
        held_out = permutation(self.held_out_windows, 0, 2**64 - 1)
        self._held_out = -1 - held_out if own else self.windows + held_out
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
        own: Records of a held-out source, as of `Order`. `held_out` is 0 then.
    """

    def __init__(self, held_out: int, global_batch: int, micro_batch: int, own: int = 0) -> None:
        self._first, self._global_batch, self._micro_batch = held_out, global_batch, micro_batch
        self.held_out_windows, self._own = own or held_out, own

    def train(self, step: int) -> Numbers:
        start = self._first + step * self._global_batch
        return np.arange(start, start + self._global_batch).reshape(-1, self._micro_batch)

    def held_out(self, index: int) -> Numbers:
        numbers = np.arange(index * self._micro_batch, (index + 1) * self._micro_batch)
        numbers %= self.held_out_windows
        return -1 - numbers if self._own else numbers
