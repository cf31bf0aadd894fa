"""Runs in a file: each line has the TOML files of a run, and what the run must give.

`python -m tests.fuzz --write FILE` writes them, and `python -m tests.digests --runs FILE` runs them
again. A run that stops and goes on has two TOML files.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import tomli_w

from tests.fuzz.draws import Case
from tests.fuzz.outcome import CaseResult


def write_case(outcome: CaseResult, file: Path) -> None:
    """Adds a case that had the bits of one rank."""
    run = {"toml": [tomli_w.dumps(config) for config in outcome.case.configs], "end": outcome.end}
    with file.open("a") as lines:
        lines.write(json.dumps(run) + "\n")


def read_cases(file: Path) -> list[Case]:
    """Reads a file of `write_case`. Cases have the numbers of their lines."""
    cases = list[Case]()
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        run = json.loads(line)
        config, *later = [tomllib.loads(text) for text in run["toml"]]
        cases.append(Case(number, config, later[0] if later else None, recorded=run["end"]))
    return cases
