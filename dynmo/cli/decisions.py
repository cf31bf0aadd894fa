"""`dynmo simulate runs/NAME/decisions.jsonl`: the decisions of a run, asked again without ranks."""

from __future__ import annotations

import json
from pathlib import Path


def run(path: Path, as_json: bool) -> None:
    """Prints each decision of a run, its reason, and whether the answer is the same again."""
    from rich.table import Table

    from dynmo.cli.console import console_for_tables
    from dynmo.errors import InputError
    from dynmo.planner.decisions import ask_again
    from dynmo.planner.situation import read_records

    rows = [(record, *ask_again(record)) for record in read_records(path)]
    if not rows:
        raise InputError(f"{path} has no decisions")
    if as_json:
        decisions = [
            {
                "step": record.situation.step,
                "kind": record.kind,
                "decided": record.answer,
                "again": answer,
                "reason": reason,
            }
            for record, answer, reason in rows
        ]
        same = all(record.answer == answer for record, answer, _ in rows)
        print(json.dumps({"decisions": decisions, "same": same}, allow_nan=False))
        return
    table = Table(title=f"{path}: {len(rows)} decisions", title_justify="left")
    for heading in ("step", "what", "again", "why"):
        table.add_column(heading, justify="right" if heading == "step" else "left")
    for record, answer, reason in rows:
        same = "the same" if answer == record.answer else f"differs: {json.dumps(answer)}"
        table.add_row(str(record.situation.step), record.kind, same, reason)
    console_for_tables().print(table)
