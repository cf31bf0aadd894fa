"""Measures the gain of a move: wall times of steps before and after it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from dynmo.events import RebalanceResultEvent

# Number of steps whose median is the time before or after a move.
_WINDOW = 5


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
        self._recent: deque[float] = deque(maxlen=_WINDOW)
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
        return self.close(step) if len(self._measurement.after) == _WINDOW + 1 else None

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
