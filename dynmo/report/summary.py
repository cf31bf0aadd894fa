"""Summarizes a run's events.

A summary has the phases between changes, each with its measured step time. `lines` shows it, and
`comparison` compares the summaries of several runs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from dynmo.change_events import (
    ChangeEvent,
    GrowEvent,
    RebalanceEvent,
    RebalanceResultEvent,
    RecoverEvent,
    ReleaseEvent,
    RepackEvent,
    ReshapeEvent,
    ResizeEvent,
    SlowRankEvent,
    SpeedsEvent,
    TokensEvent,
)
from dynmo.events import (
    DataEvent,
    EndEvent,
    EvalEvent,
    Event,
    FaultEvent,
    NotFiniteEvent,
    PostValidationEvent,
    RollbackEvent,
    SkippedEvent,
    StepResult,
)

Changes = (
    ChangeEvent
    | SpeedsEvent
    | SlowRankEvent
    | ReshapeEvent
    | SkippedEvent
    | NotFiniteEvent
    | RollbackEvent
    | PostValidationEvent
)
RankEvent = RepackEvent | GrowEvent | RecoverEvent | ReleaseEvent | FaultEvent

# Events that come before their step. A resumed run repeats them.
_ACTS = (
    StepResult
    | DataEvent
    | RebalanceEvent
    | ChangeEvent
    | SpeedsEvent
    | SlowRankEvent
    | ReshapeEvent
    | ResizeEvent
    | EndEvent
)


@dataclass(frozen=True)
class Phase:
    """Steps of the same work in one placement.

    Figures are medians over the steps. The first step warms up and is left out.

    Attributes:
        first: Number of the first step.
        last: Number of the last step.
        layers: Number of layers on each stage.
        frozen: Number of frozen layers.
        seconds: Seconds of a step.
        tokens_per_s: Tokens per second.
        idle_ratio: Idle ratio of a step.
        imbalance: Measured imbalance of the ranks.
        inherent_idle: Idle ratio at equal stages, simulated. None in older logs.
    """

    first: int
    last: int
    layers: tuple[int, ...]
    frozen: int
    seconds: float
    tokens_per_s: float
    idle_ratio: float
    imbalance: float
    inherent_idle: float | None = None

    @property
    def other_idle(self) -> float | None:
        """The rest of the idle ratio: imbalance, messages and other processes together."""
        return None if self.inherent_idle is None else self.idle_ratio - self.inherent_idle


@dataclass(frozen=True)
class DataAccount:
    """Samples of a run, as rank 0 has read them.

    Attributes:
        waited: Share of the steps' seconds that rank 0 waited for them.
        padding: Share of the tokens that are padding.
        skipped: Number of broken samples that were left out.
    """

    waited: float
    padding: float
    skipped: int


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


_OF_END = ("buffers_digest", "reason", "load", "cores", "device")


@dataclass(frozen=True)
class Summary:
    """A run in figures.

    `run_seconds`, `measure_seconds`, `decide_seconds` and `move_seconds` are None if no single
    process did all steps. The run has then not ended, or was resumed.

    Attributes:
        phases: Phases of the same work and placement.
        rebalances: Moves of layers.
        results: Measured gains of the moves.
        changes: Changes by cases, reshapes and step ends.
        steps: Number of steps.
        seconds: Seconds of all steps.
        skipped: Number of steps that updated nothing.
        loss: Loss of the last step that has a finite one, as the events have it.
        held_out: Held-out loss as the events have it.
        digest: SHA-256 of the weights.
        buffers_digest: SHA-256 of the persistent buffers.
        reason: Why the run ended.
        changed: Steps before which the work changed.
        done: All steps. Phases can be cut from them again.
        run_seconds: Seconds of the whole run, with the time between steps.
        measure_seconds: Seconds of the run that measuring took.
        decide_seconds: Seconds of the run that deciding took.
        move_seconds: Seconds of the run that moving layers took.
        tokens: Last record of token shares, if a case makes one.
        evaluation: Last evaluation.
        rank_events: Events of ranks that leave and join.
        ranks: Account of the ranks. None if they did not change.
        load: Load average of rank 0's machine at the end of the run.
        cores: Number of its cores.
        device: Its device: "cuda" or "cpu". None if unknown.
        data: Account of the samples. None if the run reads none.
        utilization: Median over the steps. None if unknown.
        memory: Most bytes of a rank in a step. 0 if unknown.
    """

    phases: tuple[Phase, ...]
    rebalances: tuple[RebalanceEvent, ...]
    results: tuple[RebalanceResultEvent, ...]
    changes: tuple[Changes, ...]
    steps: int
    skipped: int
    seconds: float
    loss: float | None
    held_out: float | None
    digest: str | None
    buffers_digest: str | None
    reason: str | None
    changed: tuple[int, ...]
    done: tuple[StepResult, ...]
    run_seconds: float | None
    measure_seconds: float | None
    decide_seconds: float | None
    move_seconds: float | None
    tokens: TokensEvent | None = None
    evaluation: EvalEvent | None = None
    rank_events: tuple[RankEvent, ...] = ()
    ranks: RankAccount | None = None
    load: float | None = None
    cores: int | None = None
    device: str | None = None
    data: DataAccount | None = None
    utilization: float | None = None
    memory: int = 0


def summarize(events: Iterable[Event]) -> Summary:
    """Summarizes the events of a run.

    A resumed run repeats the steps after its checkpoint, or ends without them. The later events
    count.
    """
    kept, is_resumed = lasting(events)
    steps = tuple(e for e in kept if isinstance(e, StepResult))
    changes = tuple(e for e in kept if isinstance(e, Changes))
    rank_events = tuple(e for e in kept if isinstance(e, RankEvent))
    seconds = sum(step.seconds for step in steps)
    tokens = next((e for e in reversed(kept) if isinstance(e, TokensEvent)), None)
    evaluation = next((e for e in reversed(kept) if isinstance(e, EvalEvent)), None)
    end = next((e for e in reversed(kept) if isinstance(e, EndEvent)), None)
    # A run that was cut off right behind a checkpoint and resumed repeats no step. The seconds of
    # its last process are then fewer than those of all steps.
    whole = None if end is None or is_resumed or end.seconds < seconds else end
    known = [step.utilization for step in steps if step.utilization is not None]
    changed = _changed(steps, [*changes, *rank_events])
    parts = ("measure_seconds", "decide_seconds", "move_seconds")
    return Summary(
        phases=cut_phases(steps, changed),
        rebalances=tuple(e for e in kept if isinstance(e, RebalanceEvent)),
        results=tuple(e for e in kept if isinstance(e, RebalanceResultEvent)),
        changes=changes,
        steps=len(steps),
        skipped=sum(step.skipped for step in steps),
        seconds=seconds,
        loss=next((step.loss for step in reversed(steps) if math.isfinite(step.loss)), None),
        held_out=evaluation.loss if evaluation else None,
        digest=end.weights_digest if end else None,
        changed=tuple(sorted(changed)),
        done=steps,
        run_seconds=whole.seconds if whole else None,
        **{key: getattr(whole, key, None) for key in parts},
        **{key: getattr(end, key, None) for key in _OF_END},
        tokens=tokens,
        evaluation=evaluation,
        rank_events=rank_events,
        ranks=_rank_account(steps, rank_events, end.gpu_seconds_returned if end else None),
        data=_data_account([e for e in kept if isinstance(e, DataEvent)], seconds),
        utilization=median(known) if known else None,
        memory=max((max(step.memory, default=0) for step in steps), default=0),
    )


def _rank_account(
    steps: Sequence[StepResult], events: Sequence[RankEvent], returned: float | None
) -> RankAccount | None:
    """Adds up the ranks of a run."""
    changes = [event for event in events if isinstance(event, ResizeEvent | RecoverEvent)]
    if not changes or not steps:
        return None
    used = 0.0
    for step in steps:
        before = [event for event in changes if event.step <= step.step]
        used += step.seconds * (before[-1].ranks_after if before else changes[0].ranks_before)
    seconds = sum(step.seconds for step in steps)
    return RankAccount(used / seconds, used, returned)


def _data_account(events: Sequence[DataEvent], seconds: float) -> DataAccount | None:
    if not seconds or not any(event.tokens for event in events):
        return None
    # The first samples come while nothing computes.
    waited = sum(event.waited for event in events[1:])
    padding = sum(event.padding for event in events) / sum(event.tokens for event in events)
    return DataAccount(waited / seconds, padding, max(event.skipped for event in events))


def lasting(events: Iterable[Event]) -> tuple[list[Event], bool]:
    """Returns the events that count, and whether the run was resumed."""
    kept: list[Event] = []
    last, has_ended, is_resumed = -1, False, False
    for event in events:
        if isinstance(event, _ACTS) and event.step <= last:
            is_resumed = True
            kept = [e for e in kept if e.step < event.step or isinstance(e, RecoverEvent)]
            last = event.step - 1
        if has_ended and isinstance(event, StepResult | EndEvent):
            is_resumed = is_resumed or isinstance(event, StepResult)
            kept = [e for e in kept if not isinstance(e, EndEvent)]
        match event:
            case StepResult():
                last, has_ended = event.step, False
            case EndEvent():
                has_ended = True
            case RebalanceEvent():  # one that no step has followed is made again
                kept = [e for e in kept if not isinstance(e, RebalanceEvent) or e.id < event.id]
            case _:
                pass
        kept.append(event)
    return kept, is_resumed


def _changed(steps: Sequence[StepResult], changes: Sequence[Changes | RankEvent]) -> set[int]:
    """Returns the steps before which the work changed, without the run's first step."""
    told = {
        c.step
        for c in changes
        if isinstance(c, ReshapeEvent | ResizeEvent) or (isinstance(c, ChangeEvent) and c.layers)
    }
    told |= {after.step for before, after in pairwise(steps) if after.frozen != before.frozen}
    return {step for step in told if steps and step > steps[0].step}


def cut_phases(steps: Sequence[StepResult], changed: Collection[int]) -> tuple[Phase, ...]:
    """Cuts the steps where the work or the placement changed."""
    groups: list[list[StepResult]] = []
    for step in steps:
        if groups and step.step not in changed and groups[-1][-1].layers == step.layers:
            groups[-1].append(step)
        else:
            groups.append([step])
    return tuple(_phase(group) for group in groups)


def _phase(group: Sequence[StepResult]) -> Phase:
    first, counted = group[0], group[1:] or group
    keys = ("seconds", "tokens_per_s", "idle_ratio", "imbalance")
    medians = (median(getattr(step, key) for step in counted) for key in keys)
    inherent = [s.inherent_idle for s in counted if s.inherent_idle is not None]
    bubble = median(inherent) if inherent else None
    steps = first.step, group[-1].step
    return Phase(*steps, first.layers, first.frozen, *medians, inherent_idle=bubble)
