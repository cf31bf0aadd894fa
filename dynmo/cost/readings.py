"""Readings of one layer's times, condensed so that no single reading decides.

    step        | 1        2        3        4        5      |   the newest `WINDOW` steps
    microbatch    0 1 2 3  0 1 2 3  0 1 2 3  0 1 2 3  0 1 2 3    one reading each, of F, B and W
    seconds     | median over the steps of each step's median |
    halves      | earlier steps    |        | later steps     |

The halves of a single step are its earlier and its later microbatches.

The two halves share no reading. A difference between layers that both halves show is a difference
that two independent measurements show.

In other steps only the layer's stage was timed. The readings are then scaled by what the stage took
(`scale`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple, final

WINDOW = 5  # steps


class Times(NamedTuple):
    """Seconds of F, B and W of one microbatch."""

    f: float = 0.0
    b: float = 0.0
    w: float = 0.0


class _Step(NamedTuple):
    whole: Times
    halves: tuple[Times, Times] | None


@final
class Readings:
    """The newest steps' readings of one layer, since it last changed or moved."""

    def __init__(self) -> None:
        self._steps: deque[_Step] = deque(maxlen=WINDOW)
        self._scale = Times(1.0, 1.0, 1.0)

    def add(self, f: Sequence[float], b: Sequence[float], w: Sequence[float]) -> None:
        """Adds the readings of one step: seconds, one per microbatch, in the order taken.

        `b` or `w` is empty if the layer has none, as in a frozen prefix.
        """
        kinds = (f, b, w)
        halves = None
        if all(len(kind) != 1 for kind in kinds):
            first = Times(*(_median(kind[: len(kind) // 2]) for kind in kinds))
            halves = first, Times(*(_median(kind[len(kind) - len(kind) // 2 :]) for kind in kinds))
        self._steps.append(_Step(Times(*map(_median, kinds)), halves))

    def add_alike(self, each: Times, several: bool) -> None:
        """Adds a step whose readings are all the same, and whether there are several."""
        self._steps.append(_Step(each, (each, each) if several else None))

    def scale(self, by: Times) -> None:
        """From now on all readings so far count as times `by`. Repeated calls do not add up."""
        self._scale = by

    @property
    def unscaled(self) -> Times:
        return _over(self._steps)

    def condense(self) -> None:
        """Has what is known count as one step, since the next steps may show something else."""
        if self._steps:
            known = _Step(self.seconds, self.halves)
            self._steps.clear()
            self._steps.append(known)
        self._scale = Times(1.0, 1.0, 1.0)

    @property
    def seconds(self) -> Times:
        return _product(self.unscaled, self._scale)

    @property
    def halves(self) -> tuple[Times, Times] | None:
        """The times by the earlier and by the later readings alone. None if a time has one only."""
        steps = list(self._steps)
        count, by = len(steps) // 2, self._scale
        if count:
            return _product(_over(steps[:count]), by), _product(_over(steps[-count:]), by)
        if not steps or steps[0].halves is None:
            return None
        first, second = steps[0].halves
        return _product(first, by), _product(second, by)


def scale_to(readings: Sequence[Readings], whole: Times) -> None:
    """Scales the readings of a stage's layers so that they sum to what the stage took.

    A kind of op that the stage or its layers do not have stays as it is.
    """
    sums = [math.fsum(each) for each in zip(*(x.unscaled for x in readings), strict=True)]
    by = Times(
        *(took / own if took and own else 1.0 for took, own in zip(whole, sums, strict=True))
    )
    for each in readings:
        each.scale(by)


def _product(times: Times, by: Times) -> Times:
    return Times(*(each * factor for each, factor in zip(times, by, strict=True)))


def _over(steps: Sequence[_Step]) -> Times:
    return Times(*map(_median, zip(*(step.whole for step in steps), strict=True)))


def _median(values: Sequence[float]) -> float:
    return median(values) if values else 0.0
