"""`dynmo report RUN [RUN ...]`: a finished run in figures, or several side by side."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dynmo.errors import InputError
from dynmo.events import read, to_json

if TYPE_CHECKING:
    from dynmo.report.summary import Summary


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, such as runs/quickstart.", show_default=False)],
    json_: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Show what was measured in a run; compare several runs against the first."""
    from dynmo.report.summary import comparison_table, console_for_tables, phase_table, rebalance_lines, summarize, verdict

    summaries: list[tuple[str, Summary]] = []
    for folder in runs:
        log = folder / "events.jsonl"
        if not log.is_file():
            raise InputError(f"{folder} is not a run: it has no events.jsonl")
        try:
            summary = summarize(read(log))
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{log} cannot be read: {error}") from None
        if not summary.phases:
            raise InputError(f"{log} has no steps yet")
        summaries.append((folder.resolve().name, summary))
    said = verdict(summaries) if len(summaries) > 1 else None
    if json_:
        print(json.dumps({"runs": [{"name": name, **_to_json(summary)} for name, summary in summaries], "verdict": said}))
        return
    console = console_for_tables()
    if len(summaries) == 1:
        console.print(phase_table(summaries[0][1]))
        for line in rebalance_lines(summaries[0][1]):
            console.print(line, highlight=False)
        return
    for name, summary in summaries:
        console.print(name, style="bold", highlight=False, markup=False)
        console.print(phase_table(summary))
        for line in rebalance_lines(summary):
            console.print(line, highlight=False)
    console.print(comparison_table(summaries))
    console.print(said, highlight=False)


def _to_json(summary: Summary) -> dict[str, Any]:
    """The events in it have the words of events.jsonl."""
    return asdict(summary) | {key: [to_json(event) for event in getattr(summary, key)] for key in ("rebalances", "results")}
