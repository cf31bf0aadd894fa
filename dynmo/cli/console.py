"""The console that the commands print their tables on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

# Columns of words. All others are numbers, to the right.
_WORDS = ("", "schedule", "layer", "layers", "what", "again", "why")


def console_for_tables() -> Console:
    """Returns a console on standard output.

    A file or a pipe has no width, so nothing is wrapped or cut off there.
    """
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=1000)


def print_table(rows: Sequence[Mapping[str, str]], title: str | None = None) -> None:
    """Prints a table with a row for each mapping from heading to cell.

    A row that lacks a cell has "-" there. `layers` is the last column.
    """
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=None if title is None else escape(title), title_justify="left")
    headings = dict.fromkeys(heading for row in rows for heading in row)
    for heading in sorted(headings, key="layers".__eq__):
        justify = "left" if heading in _WORDS else "right"
        table.add_column(heading, justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*(escape(row.get(str(x.header), "-")) for x in table.columns))
    console_for_tables().print(table)


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Shows on stderr how much is done, and how much there is, while it is open."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as shown:
        task = shown.add_task(what, total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)
