"""`dynmo report RUN [RUN ...]` shows the figures of one or more finished runs."""

from __future__ import annotations

import json
import tomllib
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dynmo.errors import InputError
from dynmo.events import read, to_json

if TYPE_CHECKING:
    from dynmo.report.summary import Summary


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Run folders, such as runs/demo-balanced.", show_default=False),
    ],
    json_: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Show what was measured in a run; compare several runs against the first."""
    from dynmo.report.summary import (
        aligned,
        comparison_table,
        console_for_tables,
        difference_line,
        differences,
        event_lines,
        noise,
        phase_table,
        summarize,
        verdict,
    )

    summaries: list[tuple[str, Summary]] = []
    for folder in runs:
        log = folder / "events.jsonl"
        if not log.is_file():
            what = (
                f"is a file; give the run's folder, {folder.parent}"
                if folder.is_file()
                else "is not a run: it has no events.jsonl"
            )
            raise InputError(f"{folder} {what}")
        try:
            summary = summarize(read(log))
        except UnicodeDecodeError:
            raise InputError(f"{log} cannot be read: not text in UTF-8") from None
        except OSError as error:
            raise InputError(f"{log} cannot be read: {error}") from None
        if not summary.phases:
            raise InputError(f"{log} has no steps yet")
        summaries.append((folder.resolve().name, summary))
    phased = aligned([summary for _, summary in summaries])
    summaries = [(name, summary) for (name, _), summary in zip(summaries, phased, strict=True)]
    said = verdict(summaries) if len(summaries) > 1 else None
    configs = [_config(folder) for folder in runs]
    differ = (
        differences([config for config in configs if config is not None])
        if len(runs) > 1 and None not in configs
        else None
    )
    if json_:
        told = {
            "runs": [{"name": name, **_to_json(summary)} for name, summary in summaries],
            "verdict": said,
            "differences": differ,
        }
        print(json.dumps(told))
        return
    console = console_for_tables()
    if len(summaries) == 1:
        console.print(phase_table(summaries[0][1]))
        for line in event_lines(summaries[0][1]):
            console.print(line, highlight=False, markup=False)
        return
    for name, summary in summaries:
        console.print(name, style="bold", highlight=False, markup=False)
        console.print(phase_table(summary))
        for line in event_lines(summary):
            console.print(line, highlight=False, markup=False)
    console.print(comparison_table(summaries))
    if differ is not None:
        console.print(difference_line(differ), highlight=False, markup=False)
    doubt = noise(summaries, differ)
    if doubt is not None:
        console.print(doubt, highlight=False, markup=False)
    console.print(said, highlight=False)


def _config(folder: Path) -> dict[str, Any] | None:
    """Returns the run's recorded config. None if it cannot be read.

    A report can do without it.
    """
    from dynmo.config import without_unused_keys

    try:
        return without_unused_keys(
            tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
        )
    except (OSError, ValueError):
        return None


def _to_json(summary: Summary) -> dict[str, Any]:
    """Returns the summary as JSON. Its events have the keys of events.jsonl."""
    told = asdict(replace(summary, done=()))
    del told["done"]
    return told | {
        key: [to_json(event) for event in getattr(summary, key)]
        for key in ("rebalances", "results", "changes", "rank_events")
    }
