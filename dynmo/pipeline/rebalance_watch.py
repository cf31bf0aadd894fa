"""Watches steps: when it is time to check whether a move pays, and what the last move gained."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import final

from dynmo.change_events import RebalanceResultEvent
from dynmo.cost.readings import WINDOW

# Number of steps whose median is the time before or after a move.
_GAIN_WINDOW = 5

# It is time to look after so many measured steps of changed work. A step's figures are medians over
# its microbatches, so one step says much. The second look helps if the first step was a freak. It
# moves nothing if it finds the same.
_LOOKS = (1, 3)

_MISSED = 0.1  # share of the imbalance


@final
class RebalanceWatch:
    """Watches the imbalance of the ranks.

    It is time after some steps at first. It is time one step after the work changed, and again a
    few steps later. It is also time when the imbalance has drifted by more than the share `drift`
    since the last decision. The imbalance is max / mean of the ranks' busy seconds.

    The watch is fed with what all ranks know of a step, so all ranks find the same.
    """

    def __init__(self, drift: float) -> None:
        self._drift = drift
        self._reference: float | None = None
        # The imbalance at the last decision, if it should have stayed.
        self._decided: float | None = None
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._first = True
        # Steps measured since the work changed, and after how many of them it is time to look.
        self._measured = 0
        self._looks: deque[int] = deque()

    def observe(self, busy: Sequence[float]) -> None:
        """Takes each rank's busy seconds of a finished step."""
        mean = math.fsum(busy) / len(busy)
        self._recent.append(max(busy) / mean if mean else 1.0)
        self._measured += 1
        if self._reference is None and len(self._recent) == WINDOW:
            self._reference = median(self._recent)
            known = self._decided
            if known is not None and abs(self._reference / known - 1) > max(_MISSED, self._drift):
                # Something changed right after the decision, and is in the reference.
                self.check_later()

    def on_workload_change(self) -> None:
        """Notes that the work has changed. If changes follow one another, the first one counts."""
        if not self._looks:
            self._measured = 0
            self._looks.extend(_LOOKS)

    def moved(self) -> None:
        """Notes that layers move, which changes the imbalance."""
        self._decided = None

    def check_later(self) -> None:
        """Notes that the decision is not certain. The next look comes with all readings new."""
        if not self._looks:
            self._measured = 0
            self._looks.append(WINDOW)

    @property
    def is_due(self) -> bool:
        if self._looks:
            return self._measured >= self._looks[0]
        if self._reference is None:
            return False
        return self._first or abs(median(self._recent) / self._reference - 1) > self._drift

    def decided(self) -> None:
        """Notes a decision. The next decision compares with measurements from now on."""
        self._first, self._reference = False, None
        self._decided = median(self._recent) if self._recent else None
        while self._looks and self._measured >= self._looks[0]:
            self._looks.popleft()
        self._recent.clear()


@dataclass
class _Measurement:
    """The open measurement of one move.

    Attributes:
        id: Number of the move.
        predicted: Share of a step that the move saves.
        before: Seconds of a step before the move.
        is_test: Whether the result says how far predictions can be trusted.
    """

    id: int
    predicted: float
    before: float
    is_test: bool
    after: list[float] = field(default_factory=list[float])


class MoveGain:
    """Compares the steps before a move with those after it.

    `doubt` is how many times the usual gain the next move must promise. It doubles after a move
    that brings less than half of the predicted gain. It is 1 again once a prediction comes true, or
    the work changes. Noise therefore cannot move layers to and fro for ever.
    """

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_GAIN_WINDOW)
        self._measurement: _Measurement | None = None
        self.doubt = 1.0

    @property
    def measured(self) -> bool:
        """True if a step was observed since the last move or change of the work."""
        return bool(self._recent)

    def observe(self, step: int, seconds: float) -> RebalanceResultEvent | None:
        self._recent.append(seconds)
        if self._measurement is None:
            return None
        self._measurement.after.append(seconds)
        return self.close(step) if len(self._measurement.after) == _GAIN_WINDOW + 1 else None

    def on_move(
        self, step: int, move: int, predicted: float, is_test: bool = True
    ) -> RebalanceResultEvent | None:
        """Begins to measure a move that was made before `step`."""
        result = self.close(step)
        self._measurement = _Measurement(move, predicted, median(self._recent), is_test)
        self._recent.clear()
        return result

    def on_workload_change(self, step: int) -> RebalanceResultEvent | None:
        """Drops the steps before `step`, which do not compare with steps after it."""
        result = self.close(step)
        self._recent.clear()
        self.doubt = 1.0
        return result

    def close(self, step: int) -> RebalanceResultEvent | None:
        """Ends the measurement of the last move.

        The first step after a move opens new channels and does not count.
        """
        measurement, self._measurement = self._measurement, None
        if measurement is None or len(measurement.after) < 2:
            return None
        gain = 1 - median(measurement.after[1:]) / measurement.before
        if measurement.is_test:
            self.doubt = 1.0 if gain >= measurement.predicted / 2 else 2 * self.doubt
        return RebalanceResultEvent(step, measurement.id, gain)
