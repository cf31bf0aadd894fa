"""Does the gain repay the move? DynMo moves at a fixed frequency and leaves the question open (section 3.6).

(seconds_now - seconds_then) * steps left  >  seconds of the move * margin      and      1 - then / now  >=  hysteresis
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dynmo.errors import PartitionError

# These balancers place without looking at costs, so there is no gain to weigh.
FORCED = ("uniform", "random", "deepspeed-uniform", "megatron-uniform", "megatron-embedding-loss")


@dataclass(frozen=True)
class Decision:
    """Whether to move; the share of a step's time that the move is predicted to save (negative where it loses); one line that says why."""

    move: bool
    predicted_gain: float
    reason: str


def worth_moving(
    seconds_now: float,
    seconds_then: float,
    horizon_steps: int,
    move_seconds: float,
    margin: float = 1.5,
    hysteresis: float = 0.02,
) -> Decision:
    """Decides from the seconds of a step as placed now and as it would be, over the `horizon_steps` for which that is believed to hold.

    `move_seconds` is the measured cost of a move. `margin` multiplies it, for predictions are better than what follows; `hysteresis` is
    the least relative gain, for noise of a percent must not move layers to and fro. Raises PartitionError for a number that is negative
    or not finite.
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
        return Decision(False, gain, f"stay: {step}, a gain of {gain:.2%} under the {hysteresis:.2%} that counts")
    sums = f"{saved:.4g} s saved over {horizon_steps} steps against {move_seconds:.4g} s for the move x {margin:g}"
    return Decision(saved > price, gain, f"{'move' if saved > price else 'stay'}: {step}, {sums}")
