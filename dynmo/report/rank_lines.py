"""Reports ranks that leave and join: a line per event, and the account of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynmo.change_events import GrowEvent, ReleaseEvent, RepackEvent, ResizeEvent, SpeedsEvent
from dynmo.events import FaultEvent, StepResult

RankEvent = RepackEvent | GrowEvent | ReleaseEvent | FaultEvent


@dataclass(frozen=True)
class RankAccount:
    """The number of ranks that the steps of a run had.

    Attributes:
        mean: Mean number of ranks, weighted by the seconds of the steps.
        gpu_seconds: Ranks times seconds, over all steps.
        returned: GPU-seconds of the ranks that were away, by the clock. None if the run has not
            ended.
    """

    mean: float
    gpu_seconds: float
    returned: float | None


def rank_account(
    steps: Sequence[StepResult], events: Sequence[RankEvent], returned: float | None
) -> RankAccount | None:
    """Adds up the ranks of a run."""
    changes = [event for event in events if isinstance(event, ResizeEvent)]
    if not changes or not steps:
        return None
    used = 0.0
    for step in steps:
        before = [event for event in changes if event.step <= step.step]
        used += step.seconds * (before[-1].ranks_after if before else changes[0].ranks_before)
    seconds = sum(step.seconds for step in steps)
    return RankAccount(used / seconds, used, returned)


def speeds_text(event: SpeedsEvent) -> str:
    """Returns the ranks that are slower or faster than the middle one, in one line."""
    odd = [f"rank {rank} at {x:.2f}" for rank, x in enumerate(event.speeds) if x != 1]
    if not odd:
        return "all ranks are equally fast again"
    return f"speeds differ: {', '.join(odd)} of the middle rank's speed"


def account_text(account: RankAccount) -> str:
    """Returns the account in one line."""
    given = "" if account.returned is None else f", {account.returned:,.1f} returned"
    return (
        f"ranks: {account.mean:.1f} on average; GPU-seconds: {account.gpu_seconds:,.1f} used in "
        f"steps{given}"
    )


def rank_text(event: RankEvent, measured: float | None = None) -> str:
    """Returns an event in one line without the step."""
    match event:
        case RepackEvent():
            predicted = event.predicted_slowdown
            return (
                f"went on with {event.ranks_after} of {event.ranks_before} ranks ({_size(event)}; "
                f"{event.reason}){_gain(None if predicted is None else -predicted, measured)}"
            )
        case GrowEvent():
            return (
                f"grew from {event.ranks_before} to {event.ranks_after} ranks ({_size(event)}; "
                f"{event.reason}){_gain(event.predicted_gain, measured)}; "
                f"{event.gpu_seconds_returned:.1f} GPU-seconds returned so far"
            )
        case ReleaseEvent():
            return f"{event.by}: {event.what} ({event.seconds:.1f} s)"
        case FaultEvent():
            return f"fault: {event.what}"


def _size(event: ResizeEvent) -> str:
    layers = "+".join(map(str, event.layers))
    replicas = f" x {event.target[1]} replicas" if event.target[1] > 1 else ""
    sizes = event.micro_batch
    resized = f", micro_batch {sizes[0]} to {sizes[1]}" if len({*sizes}) > 1 else ""
    return (
        f"layers {layers}{replicas}{resized}, {event.moved_bytes / 2**20:.1f} MiB moved, pause "
        f"{event.seconds * 1000:.0f} ms"
    )


def _gain(predicted: float | None, measured: float | None) -> str:
    """Returns the change of a step: predicted, and measured if that is known."""
    if predicted is None:
        return ""
    text = f": a step takes {-predicted:+.1%} predicted"
    return text if measured is None else f"{text}, {-measured:+.1%} measured"
