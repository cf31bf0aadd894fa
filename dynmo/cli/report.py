"""`dynmo report RUN [RUN ...]` shows the figures of one or more finished runs."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynmo.cli.options import CommandOptions, command
from dynmo.cli.output import check_plot, console_for_tables, print_json, save_plot
from dynmo.cli.rank_process import import_from_working_folder
from dynmo.cli.run_folder import check_run
from dynmo.errors import DynmoError, InputError
from dynmo.event_log import read, to_json
from dynmo.files import parse_toml, read_text

if TYPE_CHECKING:
    from dynmo.report.comparison import Differences, NamedSummary
    from dynmo.report.summary import Summary


class ReportOptions(CommandOptions):
    runs: list[Path]
    """Run folders, such as runs/demo-balanced."""
    plot: Path | None = None
    """Draw the inherent bubble and other idle time by step (.svg, .png, .pdf; needs the extra
    plot)."""


@command
def report(options: ReportOptions) -> None:
    from dynmo.report.comparison import aligned, differences, verdict

    folders = options.runs
    check_plot(options.plot)
    summaries = aligned([_summary(folder) for folder in folders])
    runs = [(folder.resolve().name, run) for folder, run in zip(folders, summaries, strict=True)]
    if options.plot is not None:
        _plot(runs, options.plot)
    configs = [_config(folder) for folder in folders]
    known = [config for config in configs if config is not None]
    differ = differences(known) if len(runs) > 1 and len(known) == len(runs) else None
    if options.as_json:
        answer = {
            "runs": [{"name": name, **_summary_json(summary)} for name, summary in runs],
            "verdict": verdict(runs) if len(runs) > 1 else None,
            "differences": differ,
        }
        print_json(answer, of_run=True)
    elif len(runs) == 1:
        _print_run(summaries[0], folders[0])
    else:
        _print_comparison(runs, differ)


def _summary(folder: Path) -> Summary:
    from dynmo.report.summary import summarize

    log = folder / "events.jsonl"
    if not log.is_file():
        check_run(folder)
        raise InputError(f"{folder} is no run: it has no events.jsonl; give runs/NAME")
    summary = summarize(read(log))
    if not summary.phases:
        raise InputError(f"{log} has no steps yet")
    return summary


def _config(folder: Path) -> dict[str, Any] | None:
    """Returns the run's recorded config. None if it cannot be read."""
    from dynmo.config import without_unused_keys

    try:
        return without_unused_keys(parse_toml(read_text(folder / "config.toml")))
    except (OSError, ValueError):
        return None


def _summary_json(summary: Summary) -> dict[str, Any]:
    """Returns the summary as JSON. Its events have the keys of events.jsonl."""
    figures = asdict(replace(summary, done=()))
    del figures["done"]
    return figures | {
        key: [to_json(event) for event in getattr(summary, key)]
        for key in ("rebalances", "results", "changes", "rank_events")
    }


def _print_run(summary: Summary, folder: Path) -> None:
    from dynmo.report.lines import event_lines, overview, phase_table

    print(overview(summary))
    console_for_tables().print(phase_table(summary))
    if not summary.rebalances and (why := _why_none_moved(folder)) is not None:
        print(why)
    for line in event_lines(summary):
        print(line)


def _why_none_moved(folder: Path) -> str | None:
    """Returns why the first decision on placement has moved no layer. None if there is none."""
    from dynmo.plan.decide import DECISIONS, read_records

    path = folder / DECISIONS
    import_from_working_folder()
    with contextlib.suppress(DynmoError):  # of an earlier version, or of a balancer that is gone
        for record in read_records(path) if path.is_file() else ():
            if record.rules.kind == "placement":
                step, reason = record.problem.work.step, record.again().verdict.reason
                return f"no layer moved: step {step}: {reason} (dynmo simulate {path})"
    return None


def _print_comparison(runs: list[NamedSummary], differ: Differences | None) -> None:
    from dynmo.report.comparison import comparison_table, conclusion, difference_line, noise

    console_for_tables().print(comparison_table(runs))
    if differ is not None:
        print(difference_line(differ))
    doubt = noise(runs, differ)
    if doubt is not None:
        print(doubt)
    print(conclusion(runs, differ))


def _plot(runs: list[NamedSummary], path: Path) -> None:
    """Draws the idle ratio of each step: the inherent bubble, and other idle time above it."""
    from matplotlib.figure import Figure  # not pyplot: no window, no state

    figure = Figure(figsize=(8, 2 + 2 * len(runs)), layout="constrained")
    panels = figure.subplots(len(runs), sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, (name, run) in zip(panels, runs, strict=True):
        steps = [step.step for step in run.done]
        idle = [100 * step.idle_ratio for step in run.done]
        inherent = [
            min(whole, 100 * (step.inherent_idle or 0.0))
            for step, whole in zip(run.done, idle, strict=True)
        ]
        axes.fill_between(steps, inherent, step="post", color="tab:gray", label="inherent bubble")
        axes.fill_between(
            steps, inherent, idle, step="post", color="tab:red", alpha=0.6, label="other idle time"
        )
        axes.set(title=name, ylabel="idle, %", ylim=(0, 100))
        for event in run.rebalances:
            axes.axvline(event.step, color="tab:blue", alpha=0.4, linewidth=1)
    panels[0].legend()
    panels[-1].set_xlabel("step")
    save_plot(figure, path)
