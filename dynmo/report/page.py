"""Writes runs as one page of HTML that needs nothing else: no network, no other file.

The command writes it as a file, and the dashboard serves the same page. Whatever a run has named is
escaped by jinja2, and the page's own policy forbids every request.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import matplotlib
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from rich.table import Table

from dynmo import __version__
from dynmo.change_events import RebalanceEvent, ResizeEvent
from dynmo.events import EndEvent, Event, FaultEvent, StepResult
from dynmo.report.comparison import (
    aligned,
    comparison_table,
    conclusion,
    difference_line,
    differences,
    noise,
)
from dynmo.report.figures import Picture, compared, pictures
from dynmo.report.lines import busy_text, event_line, event_lines, phase_table
from dynmo.report.numbers import show_share, show_time
from dynmo.report.run_record import RunRecord
from dynmo.report.verdict import diagnose

_FONT: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 9,
    "font.family": "sans-serif",
    "hatch.linewidth": 0.6,
}
_NEAR = 0.5  # share of a predicted gain that counts as having come


@cache
def _templates() -> Environment:
    loader = PackageLoader("dynmo.report", ".")
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)


@cache
def _script() -> tuple[str, str]:
    """Returns the page's script, and its hash as the page's policy names it."""
    text = files("dynmo.report").joinpath("page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return text, f"sha256-{digest}"


def page(runs: Sequence[RunRecord]) -> str:
    """Returns runs as a page, compared if they are several."""
    return whole_page(" and ".join(run.name for run in runs), body(runs))


def whole_page(title: str, inner: str, *, live: bool = False) -> str:
    """Returns a page around what `body` returns.

    Args:
        live: Whether the page asks its server for a new body twice a second.
    """
    script, digest = _script()
    return (
        _templates()
        .get_template("page.html")
        .render(
            title=title,
            version=__version__,
            body=Markup(inner),
            script=Markup(script),
            script_hash=digest,
            live=live,
        )
    )


def body(runs: Sequence[RunRecord]) -> str:
    """Returns what the page says of runs."""
    with matplotlib.rc_context(_FONT):
        return (
            _templates()
            .get_template("body.html")
            .render(
                runs=[_run(run) for run in runs],
                compared=_compared(runs) if len(runs) > 1 else None,
            )
        )


def _run(run: RunRecord) -> dict[str, Any]:
    found, summary, goodput = diagnose(run), run.summary, run.goodput
    decisions = _decisions(run)
    return {
        "name": run.name,
        "verdict": found.verdict,
        "tiles": _tiles(run),
        "pictures": [_drawn(picture) for picture in pictures(run)],
        "causes": [(x.name, show_share(x.share), x.text, x.remedy) for x in found.causes],
        "decisions": decisions,
        "no_decision": "" if decisions else run.why_none_moved or "no layer moved",
        "phases": _cells(phase_table(summary)),
        "busy": busy_text([summary]),
        "goodput": show_share(goodput.share),
        "parts": [
            (what, show_time(seconds), f"{100 * seconds / goodput.seconds:.1f}")
            for what, seconds in goodput.parts.items()
        ],
        "lines": _lines(run),
        "config": run.config_text,
    }


def _tiles(run: RunRecord) -> list[tuple[str, str]]:
    summary, last = run.summary, run.summary.phases[-1]
    return [
        (word, text)
        for word, text in (
            ("steps", f"{summary.steps:,}"),
            ("loss", "-" if summary.loss is None else f"{summary.loss:.4f}"),
            ("held-out loss", "" if summary.held_out is None else f"{summary.held_out:.4f}"),
            ("tokens/s, last phase", f"{last.tokens_per_s:,.0f}"),
            ("a step, last phase", show_time(last.seconds)),
            ("idle, last phase", show_share(last.idle_ratio)),
            ("goodput", show_share(run.goodput.share)),
            ("of the peak FLOP/s", show_share(summary.utilization) if summary.utilization else ""),
            ("waiting for data", "" if summary.data is None else show_share(summary.data.waited)),
            ("weights", (summary.digest or "")[:16]),
            ("state", summary.reason or "not ended"),
        )
        if text
    ]


def _decisions(run: RunRecord) -> list[tuple[str, ...]]:
    measured = {result.id: result.measured_gain for result in run.summary.results}
    rows: list[tuple[str, ...]] = []
    for event in run.events:
        if not isinstance(event, RebalanceEvent | ResizeEvent):
            continue
        gain = getattr(event, "predicted_gain", None)
        slower = getattr(event, "predicted_slowdown", None)
        predicted = -slower if gain is None and slower is not None else gain
        came = measured.get(event.id)
        line = (event_line(event) or "").partition(": ")[2]
        rows.append(
            (
                str(event.step),
                line.partition(": ")[0],
                str(getattr(event, "reason", "")),
                _gain(predicted),
                _gain(came),
                _made_of(run, predicted, came),
            )
        )
    return rows


def _gain(share: float | None) -> str:
    return "-" if share is None else f"{share:+.1%} of a step saved"


def _made_of(run: RunRecord, predicted: float | None, measured: float | None) -> str:
    """Says what to make of a gain, beside the predicted one."""
    if measured is None:
        return "not measured: the run ended, or the work changed again, too soon after it"
    if predicted is None or measured >= predicted - (1 - _NEAR) * abs(predicted):
        return "as predicted" if predicted is not None else "nobody predicted it"
    busy = busy_text([run.summary])
    if busy is not None:
        return f"less than predicted: {busy}; compare on a quiet one"
    return (
        "less than predicted: the costs were wrong, or something other than the layers takes the "
        "time; compare the planned step with the measured one, and see dynmo profile"
    )


def _lines(run: RunRecord) -> list[str]:
    """Returns what happened beside the decisions, in order."""
    lines = [line for line in event_lines(run.summary) if ": moved " not in line]
    last = -1
    for event in run.written:
        match event:
            case StepResult():
                if event.step <= last:
                    lines.append(
                        f"step {event.step}: went on after a stop; {last + 1 - event.step} steps "
                        "were done again"
                    )
                last = event.step
            case EndEvent() if event.reason != "done":
                lines.append(f"step {event.step}: {event.reason}")
            case FaultEvent():
                pass  # among the lines already
            case _:
                lines += _note(event)
    return lines


def _note(event: Event) -> list[str]:
    line = event_line(event) if event.event in ("checkpoint", "held_out", "saves") else None
    return [] if line is None else [line]


def _compared(runs: Sequence[RunRecord]) -> dict[str, Any]:
    summaries = aligned([run.summary for run in runs])
    named = [(run.name, summary) for run, summary in zip(runs, summaries, strict=True)]
    known = [run.config for run in runs if run.config is not None]
    differ = differences(known) if len(known) == len(runs) else None
    lines = [] if differ is None else [difference_line(differ)]
    doubt = noise(named, differ)
    return {
        "title": " and ".join(run.name for run in runs),
        "conclusion": conclusion(named, differ),
        "lines": lines if doubt is None else [*lines, doubt],
        "table": _cells(comparison_table(named)),
        "pictures": [_drawn(picture) for picture in compared(runs)],
    }


def _cells(table: Table) -> tuple[list[str], list[tuple[str, ...]]]:
    """Returns the heading and the rows of a table."""
    heading = [str(column.header) for column in table.columns]
    columns = [[str(cell) for cell in column.cells] for column in table.columns]
    return heading, list(zip(*columns, strict=True))


# -- pictures --------------------------------------------------------------------------------------


def _drawn(picture: Picture) -> dict[str, Any]:
    """Returns what the page needs of a picture: its SVG, and the values on its lines."""
    svg = to_svg(picture)
    data = ""
    if picture.lines:
        axes = picture.figure.axes[0]
        box, (low, high) = axes.get_position(), axes.get_xlim()
        lines = {
            name: [None if y is None else float(f"{y:.5g}") for y in ys]
            for name, ys in picture.lines.items()
        }
        place = {"left": box.x0, "width": box.width, "low": low, "high": high}
        data = json.dumps({"x": list(picture.x), "lines": lines, **place})
    return {**vars(picture), "svg": Markup(svg), "data": data}


def to_svg(picture: Picture) -> str:
    """Returns a picture as an SVG element that can stand beside others in one page."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": picture.key}):
        picture.figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    used = set(re.findall(r"#([\w-]+)", text))
    text = re.sub(
        r' id="([\w-]+)"', lambda match: match.group() if match.group(1) in used else "", text
    )
    label = Markup.escape(f"{picture.title}. {picture.note}")
    text = re.sub(r' (?:width|height)="[0-9.]+pt"', "", text, count=2)
    return text.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
