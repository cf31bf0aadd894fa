"""Writes docs/reference/hugging-face-folders.md. It takes a few minutes.

python -m docs.tools.folders
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from docs.tools.reference import FOLDER, table
from tests.models.huggingface.folders import Told, classes, told

PAGE = FOLDER / "hugging-face-folders.md"
_MARK, _END = "<!-- folders -->", "<!-- end of folders -->"
_HEAD = ("class", "beside", "float32 in bfloat16", "and in float16", "trained and loaded")


def row(found: Told) -> str:
    """The line of the page about a class."""
    low, more = found.kept
    cells = (f"`{found.name}`", *map(_words, (found.beside, low, more)), found.outcome)
    return table(_HEAD, [cells]).splitlines()[-1]


def _words(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def _row(name: str) -> str:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        return row(told(name, Path(folder)))


def write(page: Path) -> None:
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as workers:
        rows = list(workers.map(_row, classes()))
    before, _, rest = page.read_text().partition(_MARK)
    _, _, after = rest.partition(_END)
    lines = "\n".join((*table(_HEAD, []).splitlines(), *rows))
    page.write_text(f"{before}{_MARK}\n\n{lines}\n\n{_END}{after}")


if __name__ == "__main__":
    write(PAGE)
