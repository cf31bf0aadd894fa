"""Summarizes a run's events, and compares runs.

A summary has the phases between changes, each with its measured step time.
"""

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

# Number of steps after the first that are enough for a median. Largest relative difference of such
# medians on a quiet machine.
_ENOUGH, _NOISE = 4, 0.1

_SHOWN = 12  # events of a case that get a line each, and phases at either end

Changes = ChangeEvent | ReshapeEvent | SkippedEvent | RollbackEvent | PostValidationEvent


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
    """

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
        loss: Loss as the events have it.
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
    """Summarizes the events of a run.

    A resumed run repeats the steps after its checkpoint. The later events count.
    """
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
    # A run that was cut off right behind a checkpoint and resumed repeats no step. The seconds of
    # its last process are then fewer than those of all steps.
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
    """Cuts the phases of each run wherever the work of any run changed.

    A comparison of phases is then one of the same steps.
    """
    changed = {step for run in runs for step in run.changed}
    return [replace(run, phases=_phases(run.done, changed)) for run in runs]


def _changed(steps: Sequence[StepEvent], changes: Sequence[Changes | RankEvent]) -> set[int]:
    """Returns the steps before which the work changed, without the run's first step."""
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
    """Returns a row per phase, with the change and its effect on the step time."""
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
    """Returns lines about the events between the steps, in order.

    They are changes of the cases, moves of layers, and steps that did not count.
    """
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
                    f"reshaped {_mesh(event.source)} to {_mesh(event.target)}, layers "
                    f"{layers_text(event.layers)}",
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
                    f"step {entries[_SHOWN][0]} on: {kind} {len(entries) - _SHOWN} times more "
                    "(events.jsonl)",
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
    """Returns one line per move, with its predicted and its measured gain."""
    measured = {result.id: result.measured_gain for result in summary.results}
    lines: list[str] = []
    for event in summary.rebalances:
        line = (
            f"step {event.step}: moved {layers_text(event.source)} to {layers_text(event.target)}"
        )
        line += (
            f" ({event.moved_bytes / 2**20:.1f} MiB in {event.seconds * 1000:.0f} ms): static to "
            "balanced x"
        )
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
    """Returns a column per run, each compared with the first.

    Args:
        runs: Name and summary of each run. The summaries are from `aligned`.
    """
    table = Table(title="Runs compared", title_justify="left")
    table.add_column("")
    for name, _ in runs:
        table.add_column(name, justify="right", overflow="fold")
    summaries = [run for _, run in runs]
    first, last = summaries[0], summaries[0].phases[-1].seconds
    even = len({run.steps for run in summaries}) == 1
    changed = {step for run in summaries for step in run.changed}

    def since(run: Summary) -> int:
        """Returns the step from which on the work did not change any more."""
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
        # The last phases of runs of unequal length may be of other work.
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
    """Returns the seconds of balancing, moves or not."""
    parts = [
        x for x in (run.measure_seconds, run.decide_seconds, run.move_seconds) if x is not None
    ]
    return sum(parts) if parts else None


def _speed_up(first: Summary, run: Summary) -> str:
    """Returns the speed-up of the whole runs.

    If the seconds of a whole run are unknown, it is the speed-up of the steps, and the text says
    so.
    """
    if first.run_seconds is None or run.run_seconds is None:
        return f"x{first.seconds / first.steps * run.steps / run.seconds:.2f} (steps)"
    return f"x{first.run_seconds / first.steps * run.steps / run.run_seconds:.2f}"


def noise(
    runs: Sequence[tuple[str, Summary]], differ: Mapping[str, Sequence[Any]] | None
) -> str | None:
    """Says if the machine was not equally fast for all runs.

    It compares the steps that did the same work in all runs. These are the steps before the work or
    the placement of any run changed. The first step is left out, because it warms up.

    Args:
        runs: Name and summary of each run.
        differ: Keys of the configuration that differ, with their values. The runs compare only if
            these are keys of `[balance]`. None means that they are unknown.

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
        f"from step {first + 1} to {last} all did the same work, at {took} s a step: the machine "
        "was not alike, and nor are the speed-ups; compare runs of a quieter one"
    )


def verdict(runs: Sequence[tuple[str, Summary]]) -> str:
    """Says in one line whether the numbers are the same."""
    digests = {run.digest for _, run in runs}
    if None in digests:
        return "a run has not ended: its weights cannot be compared"
    if len(digests) > 1 or len({run.loss for _, run in runs}) > 1:
        return "the runs ended with different weights"
    buffers = {run.buffers_digest for _, run in runs}
    if len(buffers - {None}) > 1:
        return (
            "same loss and same weights, but different buffers (running statistics, say): "
            "held-out losses may differ"
        )
    same = "same loss and same weights, to the last bit"
    return same if None in buffers else f"{same}, buffers included"


def differences(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Returns the keys, as SECTION.KEY, in which the configs of runs differ.

    Each key has the value of each run. None means that it is not set. The name of a run is left
    out.
    """
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
    """Returns a console on standard output.

    A file or a pipe has no width, so nothing is wrapped or cut off there.
    """
    console = Console()
    return console if console.is_terminal else Console(width=1000)
