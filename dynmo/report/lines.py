"""What a run tells: a line per event, a table of its phases, and its live line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

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
    CheckpointEvent,
    EvalEvent,
    Event,
    FaultEvent,
    HeldOutEvent,
    NotFiniteEvent,
    PostValidationEvent,
    RollbackEvent,
    SavesEvent,
    SkippedEvent,
    StepResult,
)
from dynmo.report.numbers import plus, show_mebibytes, show_share
from dynmo.report.summary import Changes, Phase, Summary

_SLOW = 0.01  # share of the time that a run may wait for data
_BUSY = 1.25  # load for each core from which on a machine is busy
_SHOWN = 12  # events of a case that get a line each, and phases at either end


def event_line(event: Event, measured: float | None = None) -> str | None:
    """Returns an event in one line. None if it tells a reader nothing.

    Args:
        event: The event.
        measured: Share of a step that a move or a change of ranks has saved, if measured.
    """
    step, milliseconds = event.step, 1000 * getattr(event, "seconds", 0.0)
    mebibytes = f"{show_mebibytes(getattr(event, 'moved_bytes', 0))} MiB"
    match event:
        case HeldOutEvent():
            return f"held out for evaluations: {event.held_out}"
        case SavesEvent():
            return event.saves
        case ChangeEvent():
            text = f"{event.case}: {event.what}"
        case SpeedsEvent():
            text = _speeds(event)
        case SlowRankEvent():
            text = _slow(event)
        case RebalanceEvent():
            text = (
                f"moved {plus(event.source)} to {plus(event.target)}{_under(event)} ({mebibytes} "
                f"in {milliseconds:.0f} ms): static to balanced {_times(event.predicted_gain)} "
                "predicted"
            )
            text += "" if measured is None else f", {_times(measured)} measured"
        case RebalanceResultEvent():
            text = f"rebalance {event.id} measured: {event.measured_gain:+.1%} of a step saved"
        case ReshapeEvent():
            source, target = (f"{mesh[0]} x {mesh[1]}" for mesh in (event.source, event.target))
            text = f"reshaped {source} to {target}, layers {plus(event.layers)}"
        case SkippedEvent() | NotFiniteEvent() | RecoverEvent():
            text = event.text
        case RollbackEvent():
            text = f"taken back: {event.what} ({milliseconds:.0f} ms of work thrown away)"
        case PostValidationEvent():
            text = f"post-validation {'on' if event.on else 'off'}: {event.reason}"
        case EvalEvent():
            step, text = step + 1, _evaluation(event)
        case TokensEvent():
            shares = "; ".join(
                f"{what.replace('_', ' ')} {', '.join(f'{share:.0%}' for share in each)}"
                for what, each in event.shares.items()
            )
            text = f"{event.case}, layers {', '.join(map(str, event.layers))}: {shares}"
        case CheckpointEvent():
            size, seconds = show_mebibytes(event.bytes), event.seconds
            waited = "" if event.waited is None else f"; training waited {event.waited:.2f} s"
            step, text = step + 1, f"saved {event.path} ({size} MiB in {seconds:.2f} s{waited})"
        case RepackEvent():
            slower = event.predicted_slowdown
            text = (
                f"went on with {event.ranks_after} of {event.ranks_before} ranks "
                f"({_resized(event)}; {event.reason})"
                f"{_gain(None if slower is None else -slower, measured)}"
            )
        case GrowEvent():
            text = (
                f"grew from {event.ranks_before} to {event.ranks_after} ranks ({_resized(event)}; "
                f"{event.reason}){_gain(event.predicted_gain, measured)}; "
                f"{event.gpu_seconds_returned:.1f} GPU-seconds returned so far"
            )
        case ReleaseEvent():
            text = f"{event.by}: {event.what} ({event.seconds:.1f} s)"
        case FaultEvent():
            text = f"fault: {event.what}"
        case _:
            return None
    return f"step {step}: {text}"


def _speeds(event: SpeedsEvent) -> str:
    odd = [f"pipeline rank {rank} at {x:.2f}" for rank, x in enumerate(event.speeds) if x != 1]
    if not odd:
        return "all ranks are equally fast again"
    return f"speeds differ: {', '.join(odd)} of the middle rank's speed"


def _slow(event: SlowRankEvent) -> str:
    who = f"rank {event.rank} on {event.machine}"
    if event.factor == 1:
        return f"{who} is no longer slow"
    other = "the middle rank" if event.twin is None else f"its twin, rank {event.twin}"
    return f"slow: {who} takes {event.factor:.2f} times as long as {other} for equal work"


def _under(event: RebalanceEvent) -> str:
    return "" if event.schedule is None else f" under {event.schedule}"


def _times(gain: float) -> str:
    """Returns a share of a step that is saved as a factor."""
    return f"x{1 / (1 - gain):.2f}" if gain < 1 else "xinf"


def _evaluation(event: EvalEvent) -> str:
    """Returns the held-out loss. If tokens exit, also the loss without exits, and the speeds."""
    text = f"held-out loss {event.loss:.4f}"
    if event.dense_loss is None or event.tokens_per_s is None or event.dense_tokens_per_s is None:
        return text
    gain = event.tokens_per_s / event.dense_tokens_per_s
    return (
        f"{text} at {event.tokens_per_s:,.0f} tokens/s; without exits {event.dense_loss:.4f} at "
        f"{event.dense_tokens_per_s:,.0f} tokens/s (x{gain:.2f})"
    )


def _resized(event: ResizeEvent) -> str:
    replicas = f" x {event.target[1]} replicas" if event.target[1] > 1 else ""
    sizes = event.micro_batch
    resized = f", micro_batch {sizes[0]} to {sizes[1]}" if len({*sizes}) > 1 else ""
    return (
        f"layers {plus(event.layers)}{replicas}{resized}, {show_mebibytes(event.moved_bytes)} MiB "
        f"moved, pause {event.seconds * 1000:.0f} ms"
    )


def _gain(predicted: float | None, measured: float | None) -> str:
    if predicted is None:
        return ""
    text = f": a step takes {-predicted:+.1%} predicted"
    return text if measured is None else f"{text}, {-measured:+.1%} measured"


# -- a run that has ended --------------------------------------------------------------------------


def event_lines(summary: Summary) -> list[str]:
    """Returns lines about the events between the steps, in order.

    They are moves of layers, changes of the cases, and steps that did not count. Changes of a kind
    beyond the first share a line.
    """
    measured = {result.id: result.measured_gain for result in summary.results}
    events: list[Event] = [*summary.rebalances]
    by_kind: dict[str, list[Changes]] = {}
    for change in summary.changes:
        by_kind.setdefault(getattr(change, "case", change.event), []).append(change)
    for changes in by_kind.values():
        events += changes[:_SHOWN]
    events += summary.rank_events
    events += [] if summary.tokens is None else [summary.tokens]
    if summary.evaluation is not None and summary.evaluation.dense_loss is not None:
        events.append(summary.evaluation)
    lines = [
        (event.step, event_line(event, measured.get(getattr(event, "id", -1)))) for event in events
    ]
    for kind, changes in by_kind.items():
        if more := changes[_SHOWN:]:
            step = more[0].step
            lines.append((step, f"step {step} on: {kind} {len(more)} times more (events.jsonl)"))
    if summary.ranks is not None:
        ranks, given = summary.ranks, summary.ranks.returned
        text = (
            f"ranks: {ranks.mean:.1f} on average; GPU-seconds: {ranks.gpu_seconds:,.1f} used in "
            f"steps{'' if given is None else f', {given:,.1f} returned'}"
        )
        lines.append((summary.done[-1].step, text))
    return [line for _, line in sorted(lines, key=lambda pair: pair[0]) if line is not None]


def overview(summary: Summary) -> str:
    """Returns loss, time and speed of a run in one line."""
    figures = [
        f"{word} {loss:.6f}"
        for word, loss in (("loss", summary.loss), ("held-out loss", summary.held_out))
        if loss is not None
    ]
    figures.append(f"{summary.steps} steps in {summary.seconds:.1f} s")
    tokens = sum(step.tokens_per_s * step.seconds for step in summary.done)
    figures += [f"{tokens / summary.seconds:,.0f} tokens/s"] if tokens else []
    figures += [f"{summary.skipped} of them skipped"] if summary.skipped else []
    if summary.utilization is not None:
        figures.append(f"{summary.utilization:.1%} of the peak FLOP/s")
    if summary.memory:
        resident = " resident" * (summary.device == "cpu")  # Python and torch count, too
        figures.append(f"at most {show_mebibytes(summary.memory, 0)} MiB{resident} on a rank")
    if (data := summary.data) is not None:
        slow = " (the data is slower than the steps)" if data.waited > _SLOW else ""
        figures.append(f"{data.waited:.1%} waiting for data, {data.padding:.0%} padding{slow}")
        figures += [f"{data.skipped} broken samples left out"] if data.skipped else []
    if summary.reason != "done":
        figures.append(summary.reason or "not ended")
    return ", ".join(figures)


_PHASE: dict[str, Callable[[Phase], str]] = {
    "steps": lambda phase: f"{phase.first}-{phase.last}",
    "layers\nper rank": lambda phase: plus(phase.layers),
    "frozen": lambda phase: str(phase.frozen),
    "s/step": lambda phase: f"{phase.seconds:.3f}",
    "tokens/s": lambda phase: f"{phase.tokens_per_s:,.0f}",
    "idle": lambda phase: show_share(phase.idle_ratio),
    "inherent\nbubble": lambda phase: show_share(phase.inherent_idle),
    "other\nidle time": lambda phase: show_share(phase.other_idle),
    "imbalance": lambda phase: f"{phase.imbalance:.2f}",
}


def phase_table(summary: Summary) -> Table:
    """Returns a row per phase. The caption says if the machine was busy."""
    busy = busy_text([summary])
    table = Table(
        title="Measured, phase by phase (medians)",
        title_justify="left",
        caption=busy and f"{busy}: other idle time contains that of other processes",
        caption_justify="left",
    )
    for column, heading in enumerate(_PHASE):
        table.add_column(heading, justify="right" if column > 1 else "left", overflow="fold")
    phases = summary.phases
    for number, phase in enumerate(phases):
        left_out = len(phases) - 2 * _SHOWN
        if number == _SHOWN and left_out > 0:
            table.add_row("...", f"{left_out} phases more (--json)", *[""] * (len(_PHASE) - 2))
        if not _SHOWN <= number < _SHOWN + left_out:
            table.add_row(*(cell(phase) for cell in _PHASE.values()))
    return table


def busy_text(runs: Sequence[Summary]) -> str | None:
    """Returns words about the highest load of the runs' machines, if one was busy."""
    loads = [(run.load, run.cores) for run in runs if run.load is not None and run.cores]
    load, cores = max(loads, default=(0.0, 1))
    if load <= _BUSY * cores:
        return None
    return f"the machine was busy (load {load:.1f} on {cores} core{'' if cores == 1 else 's'})"


# -- a run that goes on ----------------------------------------------------------------------------


class ProgressLine:
    """Takes events and shows them on stderr, so that `--json` has stdout to itself.

    A terminal gets one live line. Any other output gets a plain line now and then.

    Args:
        name: Name of the run.
        steps: Number of steps of the run.
        console: Console to draw on. The default is stderr.
    """

    def __init__(self, name: str, steps: int, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._steps, self._name = steps, name
        self._live = self._console.is_terminal
        self._every = max(1, steps // 20)
        self._skipped = 0
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._live,
        )
        self._task = self._progress.add_task(name, total=steps, figures="")

    def __enter__(self) -> ProgressLine:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def __call__(self, event: Event) -> None:
        line = event_line(event)
        if isinstance(event, RebalanceEvent):
            line = f"{line} ({event.reason})"
        if isinstance(event, StepResult):
            done, steps = event.step + 1, self._steps
            self._skipped += event.skipped
            figures = (
                f"loss {event.loss:.4f}  {event.tokens_per_s:,.0f} tokens/s  idle "
                f"{event.idle_ratio:.0%}  layers {plus(event.layers)}"
                + (f"  frozen {event.frozen}" if event.frozen else "")
                + (f"  skipped {self._skipped}" if self._skipped else "")
            )
            self._progress.update(self._task, completed=done, figures=figures)
            if not self._live and (done % self._every == 0 or done == steps):
                line = f"{self._name} {done}/{steps}  {figures}"
        if line is not None:
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)
