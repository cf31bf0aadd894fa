"""`dynmo report RUN [RUN ...]`: a finished run in figures, or several side by side."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from dynmo.errors import InputError


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, such as runs/quickstart.", show_default=False)],
    json_: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Show what was measured in a run; compare several runs against the first."""
    from rich.console import Console

    from dynmo.events import read
    from dynmo.report.summary import comparison_table, phase_table, rebalance_lines, summarize, verdict

    summaries = []
    for folder in runs:
        log = folder / "events.jsonl"
        if not log.is_file():
            raise InputError(f"{folder} is not a run: it has no events.jsonl")
        summary = summarize(read(log))
        if not summary.phases:
            raise InputError(f"{log} has no steps yet")
        summaries.append((folder.name, summary))
    if json_:
        print(json.dumps({"runs": [{"name": name, **asdict(summary)} for name, summary in summaries], "verdict": verdict(summaries)}))
        return
    console = Console()
    if len(summaries) == 1:
        console.print(phase_table(summaries[0][1]))
        for line in rebalance_lines(summaries[0][1]):
            console.print(line, highlight=False)
        return
    for name, summary in summaries:
        console.print(f"[bold]{name}[/bold]")
        console.print(phase_table(summary))
        for line in rebalance_lines(summary):
            console.print(line, highlight=False)
    console.print(comparison_table(summaries))
    console.print(verdict(summaries), highlight=False)
