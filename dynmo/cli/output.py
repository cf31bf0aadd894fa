"""What commands show beside their answer: tables, progress, pictures and what takes long."""

# numba has no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynmo.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

# Columns of words. All others are numbers, to the right.
_WORDS = ("", "schedule", "layer", "layers", "what", "again", "why", "check", "seen", "remedy")


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


def print_facts(facts: Iterable[tuple[str, str, str]]) -> None:
    """Prints a line for each word, its number, and what the number means."""
    rows = list(facts)
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    for word, number, meaning in rows:
        print(f" {word:<{first}}  {number:>{second}}  {meaning}".rstrip())


def print_json(record: Mapping[str, Any], *, of_run: bool = False) -> None:
    """Prints the answer of --json. Only figures of a run, such as its losses, may be infinite."""
    print(json.dumps(record, allow_nan=of_run))


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Shows on a terminal how much of how much is done, on stderr, while it is open."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    text, bar = TextColumn("{task.description}", markup=False), BarColumn(bar_width=20)
    columns = (text, bar, MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as shown:
        task = shown.add_task(what, total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)


@contextmanager
def compilation_told() -> Iterator[None]:
    """Reports the first loop that numba compiles on stderr, so that a first run seems not to hang.

    Loops that numba loads from its cache are not reported.
    """
    from numba.core import event

    class Notice(event.Listener):
        is_told = False

        def on_start(self, event: object) -> None:
            if not self.is_told:
                self.is_told = True
                print("compiling dynmo's loops (once, about 20 s) ...", file=sys.stderr, flush=True)

        def on_end(self, event: object) -> None:
            pass

    with event.install_listener("numba:compile", Notice()):
        yield


def check_folder(option: str, path: Path) -> None:
    """Checks that the folder of a file is there, before the work begins."""
    if not path.parent.is_dir():
        raise InputError(f"{option} {path}: there is no folder {path.parent}")


def check_plot(path: Path | None) -> None:
    """Checks the file of `--plot` before the work begins."""
    if path is None:
        return
    if path.suffix not in (".svg", ".png", ".pdf"):
        raise InputError(f"--plot {path}: the name must end in .svg, .png or .pdf")
    check_folder("--plot", path)


def save_plot(figure: Figure, path: Path) -> None:
    try:
        figure.savefig(path)
    except OSError as error:
        raise InputError(f"--plot {path} cannot be written: {error.strerror}") from None
