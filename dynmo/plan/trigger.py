"""Decides whether the gain of a move repays the move.

DynMo moves at a fixed frequency and leaves the question open (section 3.6). Layers move here if
both conditions hold:

    (seconds_now - seconds_then) * steps left  >  seconds of the move * margin
    1 - then / now  >=  hysteresis

If a forecast says what will change, the steps left are cut into intervals. The gain is believed
only as far as it lasts, and the move back is paid, too:

    intervals  |  now 1.2 s, then 1.0 s  |  now 1.0 s, then 0.9 s  |  now 0.8 s, then 1.1 s  |
    believed   |  saves 0.2 s a step     |  saves 0.1 s a step     |  from here on it is wrong
               step                                                turn             end of the run

A gain that rests on measured times must also be certain (`confirmed`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import final

from dynmo.cost.layer_cost import Forecast, LayerCost
from dynmo.cost.readings import WINDOW
from dynmo.errors import PartitionError
from dynmo.options import ENDLESS


@dataclass(frozen=True)
class Decision:
    """A decision to move or to stay, with the reason in one line.

    `predicted_gain` is the share of a step's time that the move saves. It is negative if the move
    makes a step slower. `uncertain`: more readings may confirm a gain that is not acted on yet.
    """

    move: bool
    predicted_gain: float
    reason: str
    uncertain: bool = False


def worth_moving(
    seconds_now: float,
    seconds_then: float,
    horizon_steps: int,
    move_seconds: float,
    margin: float = 1.5,
    hysteresis: float = 0.02,
) -> Decision:
    """Decides from the seconds of a step now and after a move.

    Args:
        horizon_steps: Number of steps for which these times are believed to hold.
        move_seconds: Measured cost of a move.
        margin: Multiplies the cost of the move, because predictions are better than what follows.
        hysteresis: The least relative gain. Noise of a percent must not move layers to and fro.
    """
    given = {
        "seconds_now": seconds_now,
        "seconds_then": seconds_then,
        "horizon_steps": horizon_steps,
        "move_seconds": move_seconds,
        "margin": margin,
        "hysteresis": hysteresis,
    }
    for name, value in given.items():
        if not math.isfinite(value) or value < 0:
            raise PartitionError(f"{name} is {value}; give a number of at least 0")
    gain = 1 - seconds_then / seconds_now if seconds_now else 0.0
    saved, price = (seconds_now - seconds_then) * horizon_steps, move_seconds * margin
    step = f"a step takes {seconds_now:.4g} s and would take {seconds_then:.4g} s"
    if seconds_then >= seconds_now:
        return Decision(False, gain, f"stay: {step}, no gain")
    if gain < hysteresis:
        return Decision(
            False,
            gain,
            f"stay: {step}, a gain of {gain:.2%} under the {hysteresis:.2%} that counts",
        )
    saving = (
        f"{saved:.4g} s saved over {horizon_steps} steps"
        if horizon_steps < ENDLESS
        else f"{seconds_now - seconds_then:.4g} s saved in each step from now on"
    )
    sums = f"{saving} against {move_seconds:.4g} s for the move x {margin:g}"
    return Decision(saved > price, gain, f"{'move' if saved > price else 'stay'}: {step}, {sums}")


@dataclass(frozen=True)
class ForecastInterval:
    """The costs of the layers in the steps start .. stop - 1."""

    start: int
    stop: int
    layers: tuple[LayerCost, ...]


def forecast_intervals(
    layers: Sequence[LayerCost], forecasts: Sequence[Sequence[Forecast]], step: int, end: int
) -> tuple[ForecastInterval, ...]:
    """Cuts the steps `step` .. end - 1 where a forecast says that costs change.

    `forecasts` has those of each case. The latest forecast of a case for a layer holds, and those
    of several cases are multiplied. A layer that will have neither B nor W keeps nothing between F
    and B. A layer without W keeps nothing for W.
    """
    if end <= step:
        return ()
    turns = sorted({x.step for case in forecasts for x in case if step < x.step < end})
    starts = [step, *turns]
    return tuple(
        ForecastInterval(a, b, _expected(layers, forecasts, a))
        for a, b in zip(starts, [*turns, end], strict=True)
    )


def _expected(
    layers: Sequence[LayerCost], forecasts: Sequence[Sequence[Forecast]], step: int
) -> tuple[LayerCost, ...]:
    out = list(layers)
    for case in forecasts:
        latest: dict[int, Forecast] = {}
        for expected in sorted(case, key=lambda x: x.step):
            if expected.step <= step:
                latest |= dict.fromkeys(expected.layers, expected)
        for index, x in latest.items():
            layer = replace(
                out[index], f=out[index].f * x.f, b=out[index].b * x.b, w=out[index].w * x.w
            )
            if not layer.w:
                layer = replace(
                    layer, stash_bytes=0, activation_bytes=layer.activation_bytes if layer.b else 0
                )
            out[index] = layer
    return tuple(out)


@dataclass(frozen=True)
class Outlook:
    """Seconds of a step in the steps start .. stop - 1, now and after the move."""

    start: int
    stop: int
    now: float
    then: float


SOON = 5
"""A move is not begun if its gain is known to end in fewer steps than this.

The first step after a move opens channels anew."""


def worth_moving_through(
    outlook: Sequence[Outlook],
    move_seconds: float,
    margin: float = 1.5,
    hysteresis: float = 0.02,
    soon: int = SOON,
) -> Decision:
    """Decides as `worth_moving` does, over intervals whose differences are known, in order.

    The gain is believed up to the first interval in which the move would be no gain any more. If
    there is such an interval, the layers are assumed to move again then, so the price is paid
    twice. If that interval begins in fewer than `soon` steps, nothing moves. With a single interval
    this is `worth_moving`.
    """
    if len(outlook) < 2:
        first = outlook[0] if outlook else Outlook(0, 0, 0.0, 0.0)
        return worth_moving(
            first.now, first.then, first.stop - first.start, move_seconds, margin, hysteresis
        )
    for x in outlook:  # checks the numbers
        worth_moving(x.now, x.then, x.stop - x.start, move_seconds, margin, hysteresis)
    first, last = outlook[0], outlook[-1]
    count = next((i for i, x in enumerate(outlook) if x.then >= x.now), len(outlook))
    turns = 0 < count < len(outlook)
    stop = outlook[count].start if turns else last.stop
    if turns and stop - first.start < soon:
        return _wait(first, outlook[count])
    believed = outlook[:count] or outlook[:1]
    steps = stop - first.start if count else first.stop - first.start
    now, then = (
        math.fsum(getattr(x, key) * (x.stop - x.start) for x in believed) / max(1, steps)
        for key in ("now", "then")
    )
    price = 2 * move_seconds if turns else move_seconds
    whole = worth_moving(now, then, steps, price, margin, hysteresis)
    gain = 1 - first.then / first.now if first.now else 0.0
    until = f", until the change expected at step {stop}, and then back" if turns else ""
    return Decision(whole.move, gain, f"{whole.reason}{until}")


def _wait(first: Outlook, later: Outlook) -> Decision:
    gain = 1 - first.then / first.now
    return Decision(
        False,
        gain,
        f"wait: a gain of {gain:.2%} would last {later.start - first.start} steps; from step "
        f"{later.start} on a step would take {later.then:.4g} s instead of {later.now:.4g} s",
    )


# A gain must be at least this times the share of the ops' time that other processes take. The
# lengths of steps scatter with that share (`benchmarks.steadiness` shows by how much). A smaller
# gain would sometimes come out as a loss.
_PREEMPTED_COUNTS = 1 / 3


def confirmed(
    decision: Decision,
    parts: Sequence[Decision],
    preempted: float = 0.0,
    difference: float | None = None,
    what: str = "a gain",
) -> Decision:
    """Returns `decision` if it is certain enough, and an uncertain one to stay if not.

    The earlier and the later half of the readings must each support it. On a machine that is busy
    with other processes, it must stand out from what they disturb.

    Args:
        parts: The same question answered by disjoint parts of the readings. Empty: there is one
            reading only, which proves nothing.
        preempted: The share of its ops' time for which a rank lost its core to other processes.
        difference: The share of a step's time that must stand out. None: the predicted gain.
        what: The name of the difference, for the reason.
    """
    if not decision.move:
        return decision
    difference = decision.predicted_gain if difference is None else difference
    least, shown = _PREEMPTED_COUNTS * preempted, f"{what} of {difference:.2%}"
    if difference < least:
        why = (
            f"other processes take {preempted:.0%} of the ops' time, and {shown} is under the "
            f"{least:.2%} that counts then"
        )
    elif not parts:
        why = f"{shown} rests on one reading"
    elif not all(part.move for part in parts):
        why = f"{shown} is not what all parts of the readings say"
    else:
        return decision
    return Decision(False, decision.predicted_gain, f"stay: {why}", uncertain=True)


# It is time to look after so many measured steps of changed work. A step's figures are medians over
# its microbatches, so one step says much. The second look helps if the first step was a freak. It
# moves nothing if it finds the same.
_LOOKS = (1, 3)

_MISSED = 0.1  # share of the imbalance


@final
class RebalanceWatch:
    """Says when it is time to check whether a move pays, for `balance.every = "auto"`.

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
