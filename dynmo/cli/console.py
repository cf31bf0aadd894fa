"""The console that the commands print their tables on."""

from __future__ import annotations

from rich.console import Console


def console_for_tables() -> Console:
    """Returns a console on standard output.

    A file or a pipe has no width, so nothing is wrapped or cut off there.
    """
    console = Console()
    return console if console.is_terminal else Console(width=1000)
