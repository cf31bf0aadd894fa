"""The generated parts of a document: output of commands, tables, figures, reference tables.

- The lines under a line `dynmo schedule ..` in a block of code are a part of its output. A drawing
  is whole. Other output has only the lines that the document wants to show. `export COLUMNS=..`
  gives the width from there on. `echo '..' > FILE` makes the file for the commands after it.
- A table under `<!-- table: NAME -->` is made from a result file (docs/tools/result_tables.py).
- A figure between `<!-- figure FILE PATH FORMAT -->` and `<!-- end -->` is from a result file
  (docs/tools/figures.py).
- docs/tools/reference.py makes the tables of docs/reference.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from docs.tools import figures, reference
from docs.tools.result_tables import result_tables
from dynmo.cli import main

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "dynmo" / "cases").glob("*/README.md")),
]
COMMAND = "dynmo schedule "


def generated(text: str) -> str:
    """The text of a document with all generated parts made anew."""
    lines = figures.fill(reference.fill(text)).splitlines()
    tables = result_tables()
    edits = [(e.place, e.fresh_lines(lines)) for e in examples(lines) if e.shown]
    for line, name in marked(lines):
        place = table_at(lines, line)
        edits.append((place, tables[name].splitlines() + ([] if place else [""])))
    for place, fresh in sorted(edits, key=lambda edit: edit[0].start, reverse=True):
        lines[place.start : place.stop] = fresh
    return "\n".join(lines) + "\n"


# -- output of commands ----------------------------------------------------------------------------


@dataclass
class Example:
    """A command, the line numbers of its output, and what came before it."""

    line: int
    command: str
    width: str | None
    files: dict[str, str]
    shown: list[int] = field(default_factory=list)

    def lines(self, text: list[str]) -> list[str]:
        return [text[i] for i in self.shown]

    def run(self) -> tuple[int, list[str]]:
        """Status and what it prints on either stream, without the empty lines."""
        out = io.StringIO()
        before = os.environ.pop("COLUMNS", None)
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            for name, content in self.files.items():
                Path(name).write_text(content)
            try:
                if self.width is not None:
                    os.environ["COLUMNS"] = self.width
                with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
                    status = main(shlex.split(self.command, comments=True)[1:])
            finally:
                os.environ.pop("COLUMNS", None)
                if before is not None:
                    os.environ["COLUMNS"] = before
        return status, [line.rstrip() for line in out.getvalue().splitlines() if line.strip()]

    @property
    def place(self) -> range:
        """The lines of the document that show the output."""
        return range(self.shown[0], self.shown[-1] + 1)

    def fresh_lines(self, text: list[str]) -> list[str]:
        """What the command prints now, as far as the document shows it."""
        wanted = {about(line) for line in self.lines(text)}
        indent = " " * (len(text[self.line]) - len(text[self.line].lstrip()))
        # The times under a ruler go with it.
        return [
            indent + line
            for before, line in pairwise(["", *self.run()[1]])
            if about(line) in wanted or about(before) in wanted & {"+-----"}
        ]


def examples(text: list[str]) -> list[Example]:
    """The commands in the blocks of code, in order."""
    examples: list[Example] = []
    width: str | None = None
    files: dict[str, str] = {}
    for block, _ in code(text):
        current: Example | None = None
        for i in block:
            line = text[i].strip()
            if match := re.fullmatch(r"export COLUMNS=(\d+)", line):
                width = match[1]
            elif match := re.fullmatch(r"echo '(.*)' > (\S+)", line):
                files[match[2]] = match[1]
            elif line.startswith(COMMAND):
                current = Example(i, line, width, dict(files))
                examples.append(current)
            elif line and current is not None and not line.startswith(("dynmo ", "python ", "#")):
                current.shown.append(i)
    return examples


def code(text: list[str]) -> Iterator[tuple[list[int], str]]:
    """The line numbers of each block of code, and its language.

    A block is between fences, or indented by four.
    """
    block: list[int] = []
    fence: str | None = None
    for i, line in enumerate([*text, "end"]):
        if line.startswith("```"):
            if fence is not None:
                yield block, fence
            block, fence = [], line[3:].strip() if fence is None else None
        elif fence is not None or line.startswith("    ") or (block and not line.strip()):
            block.append(i)
        elif block:
            yield block, ""
            block = []


def is_row(line: str) -> bool:
    return re.match(r" *\d+ \|.*\|$", line) is not None


def about(line: str) -> str:
    """The subject of a line of output, whatever figure it gives."""
    if is_row(line):
        return "row"
    line = line.strip()
    return line[:6] if line.startswith(("+", "dynmo:")) else re.split(r"\s{2,}", line)[0]


# -- tables ----------------------------------------------------------------------------------------


def table_at(text: list[str], line: int) -> range:
    """The lines of the table under this one and an empty one."""
    end = next((i for i in range(line + 2, len(text)) if not text[i].startswith("|")), len(text))
    return range(line + 2, end)


def marked(text: list[str]) -> Iterator[tuple[int, str]]:
    """The line and the name of each mark of a table."""
    for i, line in enumerate(text):
        if match := re.fullmatch(r"<!-- table: ([\w ]+) -->", line):
            yield i, match[1]
