"""What a run's events say: phases between changes, each with its measured step time, and runs side
by side."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from dynmo.events import (
    ChangeEvent,
    EndEvent,
    EvalEvent,
    Event,
    FaultEvent,
    GrowEvent,
    PostValidationEvent,
    RebalanceEvent,
    RebalanceResultEvent,
    ReleaseEvent,
    RepackEvent,
    ReshapeEvent,
    RollbackEvent,
    SkippedEvent,
    StepEvent,
    TokensEvent,
)
from dynmo.report.rank_lines import RankAccount, RankEvent, account_text, rank_account, rank_text
from dynmo.report.token_lines import evaluation_text, tokens_text

# Steps after the first of a run that are enough for a median, and by what share such medians differ
# on a quiet machine at most.
_ENOUGH, _NOISE = 4, 0.1

_SHOWN = 12  # events of a case that are told one by one, and phases at either end

Changes = ChangeEvent | ReshapeEvent | SkippedEvent | RollbackEvent | PostValidationEvent


@dataclass(frozen=True)
class Phase:
    """Steps first..last of the same work in one placement. Medians over its steps; the first one
    warms up and is left out."""

    first: int
    last: int
    layers: tuple[int, ...]
    frozen: int
    seconds: float
    tokens_per_s: float
    idle_ratio: float
    imbalance: float


@dataclass(frozen=True)
class Summary:
    """A run in figures. seconds: of all steps; losses as the events have them; changes: what cases,
    reshaping and step ends did.

    changed: the steps before which the work changed. done: the steps, for phases cut anew.
    run_seconds: of all that the run did, steps and what is between them; measure_seconds,
    decide_seconds and move_seconds of these went to balancing. The four are None where no one
    process did all steps: a run that has not ended, or was resumed. ranks: None if they stayed.
    """

    phases: tuple[Phase, ...]
    rebalances: tuple[RebalanceEvent, ...]
    results: tuple[RebalanceResultEvent, ...]
    changes: tuple[Changes, ...]
    steps: int
    seconds: float
    loss: float | None
    held_out: float | None
    digest: str | None
    buffers_digest: str | None
    reason: str | None
    changed: tuple[int, ...]
    done: tuple[StepEvent, ...]
    run_seconds: float | None
    measure_seconds: float | None
    decide_seconds: float | None
    move_seconds: float | None
    tokens: TokensEvent | None = None
    evaluation: EvalEvent | None = None
    rank_events: tuple[RankEvent, ...] = ()
    ranks: RankAccount | None = None


def summarize(events: Iterable[Event]) -> Summary:
    """A resumed run repeats what came after its checkpoint; the later account counts."""
    steps: list[StepEvent] = []
    rebalances: list[RebalanceEvent] = []
    results: list[RebalanceResultEvent] = []
    changes: list[Changes] = []
    rank_events: list[RankEvent] = []
    evaluation: EvalEvent | None = None
    tokens: TokensEvent | None = None
    end: EndEvent | None = None
    resumed = False
    for event in events:
        acts = isinstance(
            event, StepEvent | RebalanceEvent | ChangeEvent | ReshapeEvent | RepackEvent | GrowEvent
        )
        if acts and steps and steps[-1].step >= event.step:
            resumed = True
            steps = [s for s in steps if s.step < event.step]
            rebalances = [r for r in rebalances if r.step < event.step]
            results = [r for r in results if r.step < event.step]
            changes = [c for c in changes if c.step < event.step]
            rank_events = [r for r in rank_events if r.step < event.step]
        match event:
            case StepEvent():
                resumed = resumed or end is not None
                steps.append(event)
                end = None
            case RebalanceEvent():
                rebalances = [r for r in rebalances if r.id < event.id]
                rebalances.append(event)
            case RebalanceResultEvent():
                results.append(event)
            case (
                ChangeEvent()
                | ReshapeEvent()
                | SkippedEvent()
                | RollbackEvent()
                | PostValidationEvent()
            ):
                changes.append(event)
            case RepackEvent() | GrowEvent() | ReleaseEvent() | FaultEvent():
                rank_events.append(event)
            case EvalEvent():
                evaluation = event
            case TokensEvent():
                tokens = event
            case EndEvent():
                end = event
            case _:
                pass
    changed = _changed(steps, [*changes, *rank_events])
    seconds = sum(s.seconds for s in steps)
    # One that was cut off right behind a checkpoint and resumed repeats no step: its last process
    # took less than all steps.
    whole = end if end is not None and not resumed and end.seconds >= seconds else None
    return Summary(
        _phases(steps, changed),
        tuple(rebalances),
        tuple(results),
        tuple(changes),
        len(steps),
        seconds,
        steps[-1].loss if steps else None,
        evaluation.loss if evaluation else None,
        end.weights_digest if end else None,
        end.buffers_digest if end else None,
        end.reason if end else None,
        tuple(sorted(changed)),
        tuple(steps),
        whole.seconds if whole else None,
        whole.measure_seconds if whole else None,
        whole.decide_seconds if whole else None,
        whole.move_seconds if whole else None,
        tokens,
        evaluation,
        tuple(rank_events),
        rank_account(steps, rank_events, end.gpu_seconds_returned if end else None),
    )


def aligned(runs: Sequence[Summary]) -> list[Summary]:
    """For a comparison: the phases of each cut wherever the work of any of them changed, so that
    what is compared are the same steps."""
    changed = {step for run in runs for step in run.changed}
    return [replace(run, phases=_phases(run.done, changed)) for run in runs]


def _changed(steps: Sequence[StepEvent], changes: Sequence[Changes | RankEvent]) -> set[int]:
    """The steps before which the work changed, but the first: that is how the run began."""
    told = {
        c.step
        for c in changes
        if isinstance(c, ReshapeEvent | RepackEvent | GrowEvent)
        or (isinstance(c, ChangeEvent) and c.layers)
    }
    told |= {after.step for before, after in pairwise(steps) if after.frozen != before.frozen}
    return {step for step in told if steps and step > steps[0].step}


def _phases(steps: Sequence[StepEvent], changed: Collection[int]) -> tuple[Phase, ...]:
    groups: list[list[StepEvent]] = []
    for step in steps:
        if groups and step.step not in changed and groups[-1][-1].layers == step.layers:
            groups[-1].append(step)
        else:
            groups.append([step])
    return tuple(_phase(group) for group in groups)


def _phase(group: Sequence[StepEvent]) -> Phase:
    counted = group[1:] or group
    return Phase(
        group[0].step,
        group[-1].step,
        group[0].layers,
        group[0].frozen,
        median(s.seconds for s in counted),
        median(s.tokens_per_s for s in counted),
        median(s.idle_ratio for s in counted),
        median(s.imbalance for s in counted),
    )


def phase_table(summary: Summary) -> Table:
    """A row per phase: what changed and what it did to the step time."""
    table = Table(title="Measured, phase by phase (medians)", title_justify="left")
    for heading in (
        "steps",
        "layers per rank",
        "frozen",
        "s/step",
        "tokens/s",
        "idle",
        "imbalance",
    ):
        table.add_column(
            heading,
            justify="left" if heading in ("steps", "layers per rank") else "right",
            overflow="fold",
        )
    left_out = len(summary.phases) - 2 * _SHOWN
    for number, phase in enumerate(summary.phases):
        if number == _SHOWN and left_out > 0:
            table.add_row("...", f"{left_out} phases more (--json)", *[""] * 5)
        if _SHOWN <= number < _SHOWN + left_out:
            continue
        table.add_row(
            f"{phase.first}-{phase.last}",
            layers_text(phase.layers),
            str(phase.frozen),
            f"{phase.seconds:.3f}",
            f"{phase.tokens_per_s:,.0f}",
            f"{phase.idle_ratio:.1%}",
            f"{phase.imbalance:.2f}",
        )
    return table


def event_lines(summary: Summary) -> list[str]:
    """What happened between the steps, in order: what the cases changed, where the layers went,
    which steps did not count."""
    lines = [
        *zip((event.step for event in summary.rebalances), rebalance_lines(summary), strict=True)
    ]
    by_kind: dict[str, list[tuple[int, str]]] = {}
    for event in summary.changes:
        match event:
            case ChangeEvent():
                kind, what = event.case, f"{event.case}: {event.what}"
            case ReshapeEvent():
                kind, what = (
                    "reshape",
                    f"reshaped {_mesh(event.source)} to {_mesh(event.target)}, layers {layers_text(event.layers)}",
                )
            case SkippedEvent():
                kind, what = (
                    "skipped",
                    f"skipped: gradients overflowed at a loss scale of {event.loss_scale:g}",
                )
            case RollbackEvent():
                kind, what = "rollback", f"taken back: {event.what}"
            case PostValidationEvent():
                kind, what = (
                    "post-validation",
                    f"post-validation {'on' if event.on else 'off'}: {event.reason}",
                )
        by_kind.setdefault(kind, []).append((event.step, f"step {event.step}: {what}"))
    for kind, entries in by_kind.items():
        lines += entries[:_SHOWN]
        if len(entries) > _SHOWN:
            lines.append(
                (
                    entries[_SHOWN][0],
                    f"step {entries[_SHOWN][0]} on: {kind} {len(entries) - _SHOWN} times more (events.jsonl)",
                )
            )
    measured = {result.id: result.measured_gain for result in summary.results}
    for event in summary.rank_events:
        gain = measured.get(event.id) if isinstance(event, RepackEvent | GrowEvent) else None
        lines.append((event.step, f"step {event.step}: {rank_text(event, gain)}"))
    if summary.ranks is not None:
        lines.append((summary.done[-1].step, account_text(summary.ranks)))
    if summary.tokens is not None:
        lines.append(
            (summary.tokens.step, f"step {summary.tokens.step}: {tokens_text(summary.tokens)}")
        )
    evaluation = summary.evaluation
    if evaluation is not None and evaluation.dense_loss is not None:
        lines.append((evaluation.step, f"step {evaluation.step}: {evaluation_text(evaluation)}"))
    return [line for _, line in sorted(lines, key=lambda pair: pair[0])]


def _mesh(shape: Sequence[int]) -> str:
    return f"{shape[0]} x {shape[1]}"


def rebalance_lines(summary: Summary) -> list[str]:
    """One line per move: predicted against measured."""
    measured = {result.id: result.measured_gain for result in summary.results}
    lines: list[str] = []
    for event in summary.rebalances:
        line = (
            f"step {event.step}: moved {layers_text(event.source)} to {layers_text(event.target)}"
        )
        line += f" ({event.moved_bytes / 2**20:.1f} MiB in {event.seconds * 1000:.0f} ms): static to balanced x"
        line += (
            f"{1 / (1 - event.predicted_gain):.2f} predicted"
            if event.predicted_gain < 1
            else "inf predicted"
        )
        if event.id in measured:
            line += f", x{1 / (1 - measured[event.id]):.2f} measured"
        lines.append(line)
    return lines


def comparison_table(runs: Sequence[tuple[str, Summary]]) -> Table:
    """A column per run, each against the first. runs: aligned."""
    table = Table(title="Runs compared", title_justify="left")
    table.add_column("")
    for name, _ in runs:
        table.add_column(name, justify="right", overflow="fold")
    summaries = [run for _, run in runs]
    first, last = summaries[0], summaries[0].phases[-1].seconds
    even = len({run.steps for run in summaries}) == 1
    changed = {step for run in summaries for step in run.changed}

    def since(run: Summary) -> int:
        """The step from which on the work was what it was in the end."""
        return max(
            (step for step in changed if step <= run.done[-1].step), default=run.done[0].step
        )

    rows: dict[str, Callable[[Summary], str]] = {
        "steps": lambda run: str(run.steps),
        "seconds, all steps": lambda run: f"{run.seconds:.1f}",
        "seconds, whole run": lambda run: (
            "-" if run.run_seconds is None else f"{run.run_seconds:.1f}"
        ),
        "measure + decide + move": lambda run: (
            "-" if (balancing := _balancing(run)) is None else f"{balancing:.2f}"
        ),
        "speed-up" if even else "speed-up, per step": lambda run: _speed_up(first, run),
        "ranks on average": lambda run: "-" if run.ranks is None else f"{run.ranks.mean:.1f}",
        "last phase: s/step": lambda run: f"{run.phases[-1].seconds:.3f}",
        # Of runs of unequal length the last phases may be of other work.
        "last phase: speed-up": lambda run: (
            f"x{last / run.phases[-1].seconds:.2f}" if since(run) == since(first) else "-"
        ),
        "last phase: idle": lambda run: f"{run.phases[-1].idle_ratio:.1%}",
        "loss": lambda run: "-" if run.loss is None else f"{run.loss:.6f}",
        "held-out loss": lambda run: "-" if run.held_out is None else f"{run.held_out:.6f}",
        "weights": lambda run: "-" if run.digest is None else run.digest[:12],
        "buffers": lambda run: "-" if run.buffers_digest is None else run.buffers_digest[:12],
    }
    for heading, cell in rows.items():
        table.add_row(heading, *map(cell, summaries))
    return table


def _balancing(run: Summary) -> float | None:
    """Seconds that went to balancing, moves or not."""
    parts = [
        x for x in (run.measure_seconds, run.decide_seconds, run.move_seconds) if x is not None
    ]
    return sum(parts) if parts else None


def _speed_up(first: Summary, run: Summary) -> str:
    """Of the whole runs; of their steps, and said so, where one of the two does not tell more."""
    if first.run_seconds is None or run.run_seconds is None:
        return f"x{first.seconds / first.steps * run.steps / run.seconds:.2f} (steps)"
    return f"x{first.run_seconds / first.steps * run.steps / run.run_seconds:.2f}"


def noise(
    runs: Sequence[tuple[str, Summary]], differ: Mapping[str, Sequence[Any]] | None
) -> str | None:
    """Says if the machine was not equally fast for all runs.

    It compares the steps that did the same work in all of them: the steps before the work or the
    placement of any run changed. The first step is left out, because it warms up.

    Args:
        runs: Name and summary of each.
        differ: Keys of the configuration that differ, with their values. The runs compare only if
            these are keys of `[balance]`. None: unknown.

    Returns:
        A line. None if the machine was equally fast, or the runs do not compare.
    """
    starts = {(run.done[0].step, run.done[0].layers, run.done[0].frozen) for _, run in runs}
    first, last = runs[0][1].done[0].step, min(run.phases[0].last for _, run in runs)
    if (
        len(starts) > 1
        or last - first < _ENOUGH
        or differ is None
        or any(not key.startswith("balance.") for key in differ)
    ):
        return None
    seconds = [
        median(step.seconds for step in run.done if first < step.step <= last) for _, run in runs
    ]
    if max(seconds) <= (1 + _NOISE) * min(seconds):
        return None
    took = " and ".join(f"{x:.3f}" for x in seconds)
    return (
        f"from step {first + 1} to {last} all did the same work, at {took} s a step: the machine was not alike, "
        "and nor are the speed-ups; compare runs of a quieter one"
    )


def verdict(runs: Sequence[tuple[str, Summary]]) -> str:
    """In one line: are the numbers the same?"""
    digests = {run.digest for _, run in runs}
    if None in digests:
        return "a run has not ended: its weights cannot be compared"
    if len(digests) > 1 or len({run.loss for _, run in runs}) > 1:
        return "the runs ended with different weights"
    buffers = {run.buffers_digest for _, run in runs}
    if len(buffers - {None}) > 1:
        return "same loss and same weights, but different buffers (running statistics, say): held-out losses may differ"
    same = "same loss and same weights, to the last bit"
    return same if None in buffers else f"{same}, buffers included"


def differences(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Keys, as SECTION.KEY, in which the configs of runs differ, with the value of each (None: not
    set). The name is a run's own."""
    flat = [_flat(config) for config in configs]
    keys = sorted({key for config in flat for key in config} - {"name"})
    values = {key: [config.get(key) for config in flat] for key in keys}
    return {key: row for key, row in values.items() if any(value != row[0] for value in row)}


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in config.items():
        out |= (
            _flat(value, f"{prefix}{key}.")
            if isinstance(value, Mapping)
            else {f"{prefix}{key}": value}
        )
    return out


def difference_line(changes: Mapping[str, Sequence[Any]]) -> str:
    shown = [
        f"{key} ({', '.join('not set' if value is None else str(value) for value in values)})"
        for key, values in changes.items()
    ]
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return (
        f"the configs differ in {', '.join(shown[:_SHOWN])}{more}"
        if shown
        else "the configs are the same"
    )


def layers_text(layers: Sequence[int]) -> str:
    return "+".join(map(str, layers))


def console_for_tables() -> Console:
    """Standard output. A file or a pipe has no width, so nothing is wrapped or cut off there."""
    console = Console()
    return console if console.is_terminal else Console(width=1000)
