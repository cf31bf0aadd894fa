"""Shows the summary of a run: a table of its phases, and lines about its events."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from dynmo.change_events import ChangeEvent, RebalanceEvent, ReshapeEvent, ResizeEvent, SpeedsEvent
from dynmo.events import PostValidationEvent, RollbackEvent, SkippedEvent
from dynmo.report.rank_lines import account_text, rank_text, speeds_text
from dynmo.report.summary import Changes, DataAccount, Summary
from dynmo.report.token_lines import evaluation_text, tokens_text

_SLOW = 0.01  # share of the time that a run may wait for data
_BUSY = 1.25  # load for each core from which on a machine is busy
_SHOWN = 12  # events of a case that get a line each, and phases at either end


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
    if summary.utilization is not None:
        figures.append(f"{summary.utilization:.1%} of the peak FLOP/s")
    if summary.memory:
        figures.append(f"at most {summary.memory / 2**20:,.0f} MiB on a rank")
    if summary.data is not None:
        figures.append(_data_text(summary.data))
    if summary.reason != "done":
        figures.append(summary.reason or "not ended")
    return ", ".join(figures)


def _data_text(data: DataAccount) -> str:
    text = f"{data.waited:.1%} waiting for data, {data.padding:.0%} padding"
    if data.waited > _SLOW:
        text += " (the data is slower than the steps)"
    return text + (f", {data.skipped} broken samples left out" if data.skipped else "")


def phase_table(summary: Summary) -> Table:
    """Returns a row per phase, with the change and its effect on the step time.

    The caption says if the machine was busy.
    """
    busy = busy_text([summary])
    table = Table(
        title="Measured, phase by phase (medians)",
        title_justify="left",
        caption=busy and f"{busy}: other idle time contains that of other processes",
        caption_justify="left",
    )
    for heading in (
        "steps",
        "layers\nper rank",
        "frozen",
        "s/step",
        "tokens/s",
        "idle",
        "inherent\nbubble",
        "other\nidle time",
        "imbalance",
    ):
        table.add_column(
            heading,
            justify="left" if heading in ("steps", "layers\nper rank") else "right",
            overflow="fold",
        )
    left_out = len(summary.phases) - 2 * _SHOWN
    for number, phase in enumerate(summary.phases):
        if number == _SHOWN and left_out > 0:
            table.add_row("...", f"{left_out} phases more (--json)", *[""] * 7)
        if _SHOWN <= number < _SHOWN + left_out:
            continue
        table.add_row(
            f"{phase.first}-{phase.last}",
            layers_text(phase.layers),
            str(phase.frozen),
            f"{phase.seconds:.3f}",
            f"{phase.tokens_per_s:,.0f}",
            f"{phase.idle_ratio:.1%}",
            share_text(phase.inherent_idle),
            share_text(phase.other_idle),
            f"{phase.imbalance:.2f}",
        )
    return table


def busy_text(runs: Sequence[Summary]) -> str | None:
    """Returns words about the highest load of the runs' machines, if one was busy."""
    loads = [(run.load, run.cores) for run in runs if run.load is not None and run.cores]
    load, cores = max(loads, default=(0.0, 1))
    if load <= _BUSY * cores:
        return None
    return f"the machine was busy (load {load:.1f} on {cores} core{'' if cores == 1 else 's'})"


def share_text(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def event_lines(summary: Summary) -> list[str]:
    """Returns lines about the events between the steps, in order.

    They are changes of the cases, moves of layers, and steps that did not count.
    """
    steps = (event.step for event in summary.rebalances)
    lines = [
        *zip(steps, rebalance_lines(summary), strict=True),
        *_change_lines(summary),
        *_rank_lines(summary),
    ]
    tokens, evaluation = summary.tokens, summary.evaluation
    if tokens is not None:
        lines.append((tokens.step, f"step {tokens.step}: {tokens_text(tokens)}"))
    if evaluation is not None and evaluation.dense_loss is not None:
        done = evaluation.step + 1
        lines.append((done, f"step {done}: {evaluation_text(evaluation)}"))
    return [line for _, line in sorted(lines, key=lambda pair: pair[0])]


def _change_lines(summary: Summary) -> list[tuple[int, str]]:
    """Returns step and line of each change. Changes of a kind beyond the first share a line."""
    by_kind: dict[str, list[tuple[int, str]]] = {}
    for event in summary.changes:
        kind, what = _change(event)
        by_kind.setdefault(kind, []).append((event.step, f"step {event.step}: {what}"))
    lines: list[tuple[int, str]] = []
    for kind, entries in by_kind.items():
        lines += entries[:_SHOWN]
        if len(entries) > _SHOWN:
            step, more = entries[_SHOWN][0], len(entries) - _SHOWN
            lines.append((step, f"step {step} on: {kind} {more} times more (events.jsonl)"))
    return lines


def _change(event: Changes) -> tuple[str, str]:
    """Returns the kind of a change, and what has changed."""
    match event:
        case ChangeEvent():
            return event.case, f"{event.case}: {event.what}"
        case SpeedsEvent():
            return "speeds", speeds_text(event)
        case ReshapeEvent():
            source, target = (f"{mesh[0]} x {mesh[1]}" for mesh in (event.source, event.target))
            return "reshape", f"reshaped {source} to {target}, layers {layers_text(event.layers)}"
        case SkippedEvent():
            return "skipped", (
                f"skipped: gradients overflowed at a loss scale of {event.loss_scale:g}"
            )
        case RollbackEvent():
            return "rollback", f"taken back: {event.what}"
        case PostValidationEvent():
            return "post-validation", (
                f"post-validation {'on' if event.on else 'off'}: {event.reason}"
            )


def _rank_lines(summary: Summary) -> list[tuple[int, str]]:
    """Returns step and line of each event of the ranks, and of their account."""
    measured = {result.id: result.measured_gain for result in summary.results}
    lines: list[tuple[int, str]] = []
    for event in summary.rank_events:
        gain = measured.get(event.id) if isinstance(event, ResizeEvent) else None
        lines.append((event.step, f"step {event.step}: {rank_text(event, gain)}"))
    if summary.ranks is not None:
        lines.append((summary.done[-1].step, account_text(summary.ranks)))
    return lines


def rebalance_lines(summary: Summary) -> list[str]:
    """Returns one line per move, with its predicted and its measured gain."""
    measured = {result.id: result.measured_gain for result in summary.results}
    lines: list[str] = []
    for event in summary.rebalances:
        line = (
            f"step {event.step}: moved {layers_text(event.source)} to {layers_text(event.target)}"
            f"{new_schedule_text(event)}"
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


def new_schedule_text(event: RebalanceEvent) -> str:
    return "" if event.schedule is None else f" under {event.schedule}"


def layers_text(layers: Sequence[int]) -> str:
    return "+".join(map(str, layers))
