"""Cases in files: each is a run, with the digests that it must have.

`python -m tests.fuzz --write FOLDER` writes them, and `python -m tests.digests --folder FOLDER`
runs them again. `dynmo train FILE` runs one of them: the digests are in comments.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import tomli_w

from tests.fuzz.draws import Case, without_stop
from tests.fuzz.outcome import CaseResult

_MARK = "# digests: "


def write_case(outcome: CaseResult, folder: Path, repeat: str) -> None:
    """Writes a case that had the bits of one rank. A run in two parts becomes two whole runs.

    Args:
        outcome: Outcome of the case.
        folder: Folder of the files.
        repeat: Command that runs the case again.
    """
    case = outcome.case
    names = [f"fuzz-{case.number}", f"fuzz-{case.number}-resumed"]
    for name, config in zip(names, case.configs, strict=False):
        whole = {**config, "dynamism": without_stop(config), "checkpoint": {}, "name": name}
        head = f"# {repeat}\n{_MARK}{json.dumps(outcome.end)}\n"
        (folder / f"{name}.toml").write_text(head + tomli_w.dumps(whole))


def read_case(file: Path, number: int) -> Case:
    """Reads a file of `write_case`.

    Raises:
        ValueError: The file does not say which digests it must have.
    """
    text = file.read_text()
    marked = [line for line in text.splitlines() if line.startswith(_MARK)]
    if not marked:
        raise ValueError(f"{file} has no line that starts with {_MARK!r}")
    return Case(number, tomllib.loads(text), recorded=json.loads(marked[0].removeprefix(_MARK)))
