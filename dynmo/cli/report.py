"""`dynmo report RUN [RUN ...]` shows the figures of one or more finished runs."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dynmo.cli.options import command
from dynmo.errors import InputError
from dynmo.events import read, to_json

if TYPE_CHECKING:
    from dynmo.report.summary import Summary


@dataclass(frozen=True)
class ReportOptions:
    """The options of `dynmo report`."""

    runs: Annotated[
        list[Path],
        typer.Argument(help="Run folders, such as runs/demo-balanced.", show_default=False),
    ]
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False


@dataclass(frozen=True)
class _Comparison:
    """Runs whose phases are aligned.

    Attributes:
        runs: Name and summary of each run.
        verdict: Whether the numbers are the same. None for a single run.
        differences: Keys of the configs that differ. None if a config cannot be read, and for a
            single run.
    """

    runs: list[tuple[str, Summary]]
    verdict: str | None
    differences: dict[str, list[Any]] | None


@command
def report(options: ReportOptions) -> None:
    """Show what was measured in a run; compare several runs against the first."""
    comparison = _compare(options.runs)
    if options.as_json:
        print(json.dumps(_to_json(comparison)))
    else:
        _print_text(comparison)


def _compare(folders: Sequence[Path]) -> _Comparison:
    from dynmo.report.comparison import aligned, differences, verdict

    summaries = aligned([_summary(folder) for folder in folders])
    names = [folder.resolve().name for folder in folders]
    runs = list(zip(names, summaries, strict=True))
    if len(runs) == 1:
        return _Comparison(runs, None, None)
    configs = [config for folder in folders if (config := _config(folder)) is not None]
    return _Comparison(
        runs, verdict(runs), differences(configs) if len(configs) == len(runs) else None
    )


def _summary(folder: Path) -> Summary:
    """Returns the summary of a run's events."""
    from dynmo.report.summary import summarize

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
    return summary


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


def _to_json(comparison: _Comparison) -> dict[str, Any]:
    return {
        "runs": [{"name": name, **_summary_json(summary)} for name, summary in comparison.runs],
        "verdict": comparison.verdict,
        "differences": comparison.differences,
    }


def _summary_json(summary: Summary) -> dict[str, Any]:
    """Returns the summary as JSON. Its events have the keys of events.jsonl."""
    figures = asdict(replace(summary, done=()))
    del figures["done"]
    return figures | {
        key: [to_json(event) for event in getattr(summary, key)]
        for key in ("rebalances", "results", "changes", "rank_events")
    }


def _print_text(comparison: _Comparison) -> None:
    from dynmo.cli.console import console_for_tables
    from dynmo.report.comparison import comparison_table, difference_line, noise
    from dynmo.report.summary_text import event_lines, phase_table

    console, runs = console_for_tables(), comparison.runs
    for name, summary in runs:
        if len(runs) > 1:
            console.print(name, style="bold", highlight=False, markup=False)
        console.print(phase_table(summary))
        for line in event_lines(summary):
            console.print(line, highlight=False, markup=False)
    if len(runs) == 1:
        return
    console.print(comparison_table(runs))
    if comparison.differences is not None:
        console.print(difference_line(comparison.differences), highlight=False, markup=False)
    doubt = noise(runs, comparison.differences)
    if doubt is not None:
        console.print(doubt, highlight=False, markup=False)
    console.print(comparison.verdict, highlight=False)
