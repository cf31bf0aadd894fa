"""The figures of draws, and their tables."""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.faults.draws import KINDS, STEPS, TIMEOUT
from benchmarks.faults.inject import PHASES
from benchmarks.output import markdown

Row = dict[str, Any]

LIVE, RESTARTED, UNHARMED, LINE, FAILED = "live", "restarted", "unharmed", "line", "failed"
HOW = (LIVE, UNHARMED, RESTARTED, LINE, FAILED)


def counts(row: Row) -> bool:
    """Whether a row is a kill or a stop of one rank after the first step."""
    is_one = row["kind"] in ("kill", "stop", "stop for a while")
    return is_one and bool(row["struck"]) and 0 < row.get("at_step", 0) < STEPS


def summary(rows: list[Row]) -> dict[str, Any]:
    """Returns the figures of all rows."""
    counted = [row for row in rows if counts(row)]
    live = [row for row in counted if row["how"] in (LIVE, UNHARMED)]
    kinds = [kind for kind in KINDS if any(row["kind"] == kind for row in rows)]
    phases = [x for x in (*PHASES, "a time") if any(row["phase"] == x for row in rows)]
    return {
        "draws": len(rows),
        "failed": sorted(row["number"] for row in rows if row["how"] == FAILED),
        "kills_and_stops": len(counted),
        "live_share": len(live) / len(counted) if counted else None,
        "timeout": TIMEOUT,
        "kinds": [{"kind": kind} | _cell(rows, kind=kind) for kind in kinds],
        "cells": [
            {"phase": phase, "kind": kind, **cell}
            for phase in phases
            for kind in kinds
            if (cell := _cell(rows, kind=kind, phase=phase))["draws"]
        ],
    }


def _cell(rows: list[Row], **which: str) -> dict[str, Any]:
    rows = [row for row in rows if row | which == row]
    cell: dict[str, Any] = {"draws": len(rows)}
    cell |= {how: sum(row["how"] == how for row in rows) for how in HOW}
    for key in ("noticed", "next_step", "repeated"):
        values = [row[key] for row in rows if key in row]
        cell[key] = round(median(values), 3) if values else None
    return cell


def tables(figures: dict[str, Any]) -> dict[str, str]:
    """Returns the table of faults, and that of faults by phases."""
    head = ["fault", "draws", *HOW, "noticed, s", "next step, s", "repeated"]
    by_kind = markdown(
        head,
        [
            [cell["kind"], *(str(cell[key]) for key in ("draws", *HOW)), *_times(cell)]
            for cell in figures["kinds"]
        ],
    )
    kinds = [cell["kind"] for cell in figures["kinds"]]
    known = {(cell["phase"], cell["kind"]): cell for cell in figures["cells"]}
    phases = list(dict.fromkeys(cell["phase"] for cell in figures["cells"]))
    by_phase = markdown(
        ["phase", *kinds],
        [[phase, *(_text(known.get((phase, kind))) for kind in kinds)] for phase in phases],
    )
    return {"faults": by_kind, "faults by phase": by_phase}


def _times(cell: dict[str, Any]) -> list[str]:
    repeated = cell["repeated"]
    seconds = [cell["noticed"], cell["next_step"]]
    return [
        *("" if x is None else f"{x:.2f}" for x in seconds),
        "" if repeated is None else f"{repeated:g}",
    ]


def _text(cell: dict[str, Any] | None) -> str:
    """Returns seconds until noticed and until the next step, and steps repeated."""
    if cell is None:
        return ""
    times = _times(cell)
    return " / ".join(text or "-" for text in times) if any(times) else "none"
