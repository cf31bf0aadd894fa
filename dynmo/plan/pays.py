"""Decides whether a change repays itself. One rule stands for all changes.

DynMo moves at a fixed frequency and leaves the question open (section 3.6). Here a change is made
if both conditions hold:

    saved in a step * steps for which that is believed  >  price * margin
    1 - then / now  >=  hysteresis

    change                       saved in a step                          price
    placement, schedule, mesh    seconds now - seconds then               seconds of the move
    fewer ranks                  (ranks now - ranks then) x seconds then  ranks now x the pause
    more ranks                   seconds now - seconds then               seconds of the pause

If a forecast says what will change, the steps left are cut into intervals. The gain is believed
only as far as it lasts, and the way back is paid, too:

    intervals  |  now 1.2 s, then 1.0 s  |  now 1.0 s, then 0.9 s  |  now 0.8 s, then 1.1 s  |
    believed   |  saves 0.2 s a step     |  saves 0.1 s a step     |  from here on it is wrong
               step                                                turn             end of the run

A gain that rests on measured times must also be certain (`confirm`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import NamedTuple

from dynmo.options import ENDLESS
from dynmo.plan.problem import Layers, Problem

SOON = 5
"""A change is not made if its gain is known to end in fewer steps than this.

The first step after a move opens channels anew."""

# Later intervals of a forecast are not looked at, and nothing is saved in them.
_INTERVALS = 8

# A gain must be at least this times the share of the ops' time that other processes take. The
# lengths of steps scatter with that share (`benchmarks.steadiness` shows by how much). A smaller
# gain would sometimes come out as a loss.
_PREEMPTED_COUNTS = 1 / 3


@dataclass(frozen=True)
class Verdict:
    """Whether a change is made, with the reason in one line.

    Attributes:
        gain: Share of a step's time that the change saves. Negative if a step becomes slower.
        uncertain: More readings may confirm a gain that is not acted on yet.
        price: What the change costs.
        lead: Share of a step's time by which it beats what it must beat. None: the gain.
    """

    pays: bool
    gain: float
    reason: str
    uncertain: bool = False
    price: float = 0.0
    lead: float | None = None


@dataclass(frozen=True)
class Change:
    """What a change costs, and what it must bring.

    Attributes:
        price: What the change costs, in `unit`.
        price_back: What the way back costs.
        margin: Multiplies the price, because predictions are better than what follows.
        hysteresis: The least relative gain. Noise of a percent must not move layers to and fro.
        what: The change in words. Empty: the seconds of a step.
    """

    price: float
    price_back: float
    margin: float = 1.5
    hysteresis: float = 0.02
    unit: str = "s"
    what: str = ""


class Interval(NamedTuple):
    """The costs of the layers in the steps start .. stop - 1."""

    start: int
    stop: int
    layers: Layers


Seconds = Callable[[Layers], tuple[float, float] | None]
"""What a step takes at some costs, now and after the change. None: there it is impossible."""


def pays(change: Change, intervals: Iterable[Interval], seconds: Seconds) -> Verdict:
    """Decides whether a change repays itself in these intervals.

    Only as many intervals are looked at as it takes to repay the change and the way back.
    """
    both = (change.price + change.price_back) * change.margin
    first, steps, saved, before = (0.0, 0.0), 0, 0.0, 0.0
    turn: int | None = None
    more = ""
    for number, (start, stop, layers) in enumerate(intervals):
        if number and saved > both and steps >= SOON and saved >= change.hysteresis * before:
            more = "at least "
            break
        found = seconds(layers) if number < _INTERVALS else None
        if found is not None:
            first = first if number else found
        if found is None or found[1] >= found[0]:
            turn = start
            break
        steps += stop - start
        saved += (found[0] - found[1]) * (stop - start)
        before += found[0] * (stop - start)
    now, then = first
    gain = gain_of(now, then)
    what = change.what or f"a step takes {now:.4g} s and would take {then:.4g} s"
    stay = Verdict(False, gain, f"stay: {what}, no gain", price=change.price)
    if not steps:
        return stay
    if turn is not None and steps < SOON:
        lasts = f"that would pay for {_steps(steps)} only, until step {turn}"
        return replace(stay, reason=f"wait: {what}; {lasts}")
    share = saved / before
    if share < change.hysteresis:
        least = f"a gain of {share:.2%} under the {change.hysteresis:.2%} that counts"
        return replace(stay, reason=f"stay: {what}, {least}")
    price = change.price if turn is None else change.price + change.price_back
    sums = (
        f"{saved:.4g} {change.unit} saved over {more}{_steps(steps)}"
        if steps < ENDLESS
        else f"{now - then:.4g} {change.unit} saved in each step from now on"
    )
    sums += f" against {price:.4g} {change.unit} for the move x {change.margin:g}"
    until = "" if turn is None else f", until the change expected at step {turn}, and then back"
    is_worth = saved > price * change.margin
    act = "move" if is_worth else "stay"
    return Verdict(is_worth, gain, f"{act}: {what}, {sums}{until}", price=change.price)


def gain_of(now: float, then: float) -> float:
    """The share of a step that is saved."""
    return 1 - then / now if now else 0.0


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def confirm(verdict: Verdict, parts: Sequence[bool], preempted: float = 0.0) -> Verdict:
    """Returns the verdict if it is certain enough, and an uncertain one to stay if not.

    The earlier and the later half of the readings must each support it. On a machine that is busy
    with other processes, it must stand out from what they disturb.

    Args:
        parts: The same question answered by disjoint parts of the readings. Empty: there is one
            reading only, which proves nothing.
        preempted: The share of its ops' time for which a rank lost its core to other processes.
    """
    if not verdict.pays:
        return verdict
    lead = verdict.gain if verdict.lead is None else verdict.lead
    least, what = _PREEMPTED_COUNTS * preempted, "a gain" if verdict.lead is None else "a lead"
    shown = f"{what} of {lead:.2%}"
    if lead < least:
        why = (
            f"other processes take {preempted:.0%} of the ops' time, and {shown} is under the "
            f"{least:.2%} that counts then"
        )
    elif not parts:
        why = f"{shown} rests on one reading"
    elif not all(parts):
        why = f"{shown} is not what all parts of the readings say"
    else:
        return verdict
    return replace(verdict, pays=False, reason=f"stay: {why}", uncertain=True)


# -- what is known of the future -------------------------------------------------------------------


def intervals(problem: Problem) -> tuple[Interval, ...]:
    """Cuts the steps that are left where a forecast says that costs change.

    The latest forecast of a case for a layer holds, and those of several cases are multiplied. A
    layer that will have neither B nor W keeps nothing between F and B. A layer without W keeps
    nothing for W.
    """
    step, end = problem.work.step, problem.work.end
    if end <= step:
        return ()
    turns = sorted({x.step for case in problem.forecasts for x in case if step < x.step < end})
    starts = [step, *turns]
    return tuple(
        Interval(a, b, _expected(problem, a)) for a, b in zip(starts, [*turns, end], strict=True)
    )


def _expected(problem: Problem, step: int) -> Layers:
    out = list(problem.layers)
    for case in problem.forecasts:
        latest = {
            index: x
            for x in sorted(case, key=lambda x: x.step)
            if x.step <= step
            for index in x.layers
        }
        for index, x in latest.items():
            old = out[index]
            layer = replace(old, f=old.f * x.f, b=old.b * x.b, w=old.w * x.w)
            if not layer.w:
                kept = layer.activation_bytes if layer.b else 0
                layer = replace(layer, stash_bytes=0, activation_bytes=kept)
            out[index] = layer
    return tuple(out)


def at(problem: Problem, layers: Layers) -> Problem:
    """Returns the same problem with layers of other costs."""
    if layers == problem.layers:
        return problem
    first = len(list(takewhile(lambda x: not x.b and not x.w, layers[:-1])))
    profile = replace(problem.profile, layers=layers, first_trainable=first)
    return replace(problem, profile=profile)
