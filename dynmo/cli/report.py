"""`dynmo report RUN [RUN ...]` shows the figures of one or more finished runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynmo.cli.options import CommandOptions, command
from dynmo.cli.output import (
    check_folder,
    check_plot,
    compilation_told,
    console_for_tables,
    print_json,
    save_plot,
)
from dynmo.cli.rank_process import import_from_working_folder
from dynmo.cli.run_folder import check_run
from dynmo.errors import InputError
from dynmo.event_log import to_json
from dynmo.files import write_whole
from dynmo.report.numbers import show_size

if TYPE_CHECKING:
    from dynmo.report.comparison import Differences, NamedSummary
    from dynmo.report.run_record import RunRecord
    from dynmo.report.summary import Summary


class ReportOptions(CommandOptions):
    runs: list[Path]
    """Run folders, such as runs/demo-balanced."""
    html: bool = False
    """Write a page with pictures, as one file that needs no network."""
    out: Path | None = None
    """Where the page goes (default: report.html in the first run's folder)."""
    plot: Path | None = None
    """Draw the inherent bubble and other idle time by step (.svg, .png, .pdf)."""

    def _problems(self) -> Iterator[str]:
        if self.out is not None and not self.html:
            yield "--out says where the page of --html goes; add --html"


@command
@compilation_told()
def report(options: ReportOptions) -> None:
    from dynmo.report.comparison import aligned, differences, verdict
    from dynmo.report.run_record import RunRecord
    from dynmo.report.verdict import diagnose

    folders = options.runs
    check_plot(options.plot)
    if options.out is not None:
        check_folder("--out", options.out)
    import_from_working_folder()
    for folder in folders:
        if not (folder / "events.jsonl").is_file():
            check_run(folder)
    records = [RunRecord.read(folder) for folder in folders]
    summaries = aligned([record.summary for record in records])
    runs = [(record.name, run) for record, run in zip(records, summaries, strict=True)]
    if options.plot is not None:
        _plot(records, options.plot)
    if options.html:
        _write_page(records, options)
    known = [record.config for record in records if record.config is not None]
    differ = differences(known) if len(runs) > 1 and len(known) == len(runs) else None
    if options.as_json:
        answer = {
            "runs": [
                {"name": record.name, **_summary_json(run), "diagnosis": asdict(diagnose(record))}
                for record, run in zip(records, summaries, strict=True)
            ],
            "verdict": verdict(runs) if len(runs) > 1 else None,
            "differences": differ,
        }
        print_json(answer, of_run=True)
    elif len(runs) == 1:
        _print_run(records[0])
    else:
        _print_comparison(runs, differ)


def _summary_json(summary: Summary) -> dict[str, Any]:
    """Returns the summary as JSON. Its events have the keys of events.jsonl."""
    figures = asdict(replace(summary, done=()))
    del figures["done"]
    return figures | {
        key: [to_json(event) for event in getattr(summary, key)]
        for key in ("rebalances", "results", "changes", "rank_events")
    }


def _print_run(record: RunRecord) -> None:
    from dynmo.report.lines import event_lines, overview, phase_table
    from dynmo.report.verdict import diagnose

    print(overview(record.summary))
    console_for_tables().print(phase_table(record.summary))
    if not record.summary.rebalances and (why := record.why_none_moved) is not None:
        print(why)
    for line in event_lines(record.summary):
        print(line)
    print(diagnose(record).verdict)


def _print_comparison(runs: list[NamedSummary], differ: Differences | None) -> None:
    from dynmo.report.comparison import comparison_table, conclusion, difference_line, noise

    console_for_tables().print(comparison_table(runs))
    if differ is not None:
        print(difference_line(differ))
    doubt = noise(runs, differ)
    if doubt is not None:
        print(doubt)
    print(conclusion(runs, differ))


def _plot(runs: list[RunRecord], path: Path) -> None:
    from matplotlib.figure import Figure  # not pyplot: no window, no state

    from dynmo.report.figures import draw_idleness

    figure = Figure(figsize=(8, 2 + 2 * len(runs)), layout="constrained")
    panels = figure.subplots(len(runs), sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, run in zip(panels, runs, strict=True):
        draw_idleness(axes, run)
        axes.set_title(run.name)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper right", ncols=2)
    save_plot(figure, path)


def _write_page(runs: list[RunRecord], options: ReportOptions) -> None:
    from dynmo.report.page import page

    path = options.out or options.runs[0] / "report.html"
    text = page(runs)
    try:
        write_whole(path, text)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from None
    print(f"wrote {path} ({show_size(len(text.encode()))}): open it in a browser", file=sys.stderr)
