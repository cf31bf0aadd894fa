"""Loss scaling: B starts from the loss times a power of two.

Small gradients then do not vanish in float16.

    step       0 ... 1999      2000 ... 3999       4000    4001 ...
    scale      65536           131072              262144  131072
    gradients  finite          finite              inf     finite

The scale doubles after every window of good steps. An overflow halves it, and its step is skipped.

The gradients are divided again before anyone reads them. Powers of two change no bits, except for
bits that would be lost without them.
"""

from __future__ import annotations

import math

import torch

INITIAL = 2.0**16
WINDOW = 2000  # good steps until a dynamic scale doubles
_LARGEST = 2.0**64  # float32 gradients times this are still far from its end


class LossScaler:
    """The scale of the loss, and the rule that changes it.

    Args:
        scale: First factor of the loss, a power of two. 1 means no scaling.
        window: Good steps until the scale doubles. None: the scale stays.
    """

    def __init__(self, scale: float = 1.0, window: int | None = None) -> None:
        assert math.frexp(scale)[0] == 0.5, "a power of two"
        self.scale, self._window = scale, window
        self._good = 0

    @property
    def dynamic(self) -> bool:
        return self._window is not None

    @property
    def skips(self) -> bool:
        """Whether a step with bad gradients is skipped, because a lower scale may do."""
        return self.dynamic and self.scale > 1

    def observe(self, finite: bool) -> None:
        """Adapts the scale after each step. `finite` is False only if the scaler `skips`."""
        if self._window is None:
            return
        if not finite:
            assert self.skips
            self.scale, self._good = self.scale / 2, 0
            return
        self._good += 1
        if self._good >= self._window:  # a resumed run's window may be shorter
            self.scale, self._good = min(2 * self.scale, _LARGEST), 0

    def state(self) -> dict[str, float]:
        return {"scale": self.scale, "good": self._good}

    def load(self, state: dict[str, float]) -> None:
        """Loads a checkpoint's state. A scale that stays is the config's."""
        if self.dynamic:
            self.scale, self._good = float(state["scale"]), int(state["good"])


def make_scaler(
    dtype: torch.dtype, loss_scale: float | str | None = None, window: int = WINDOW
) -> LossScaler:
    if loss_scale == "dynamic" or (loss_scale is None and dtype == torch.float16):
        return LossScaler(INITIAL, window)
    return LossScaler(1.0 if loss_scale is None else float(loss_scale))
