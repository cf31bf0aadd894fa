"""What the random test prints: the summary, and the TOML files that replay a failure."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w

from benchmarks.output import machine
from tests.fuzz.outcome import EQUAL, FAILED, REFUSED, CaseResult

MOST_REFUSED = 0.05


def replay(outcome: CaseResult, folder: Path) -> str:
    """Writes the TOML files of a case and says how to run them.

    Args:
        outcome: Outcome of the case.
        folder: Folder of the files.

    Returns:
        The commands, and each file's text.
    """
    case = outcome.case
    name = f"fuzz-{case.number}"
    files = {name: case.config}
    commands = [f"dynmo train {folder / name}.toml --overwrite"]
    if case.resumed is not None:
        files[f"{name}-resumed"] = {**case.resumed, "name": name}
        commands.append(f"dynmo train {folder / name}-resumed.toml --resume")
    files[f"{name}-reference"] = {"name": f"{name}-reference", **case.reference}
    commands.append(f"dynmo train {folder / name}-reference.toml --overwrite")
    folder.mkdir(parents=True, exist_ok=True)
    for stem, tables in files.items():
        (folder / f"{stem}.toml").write_text(tomli_w.dumps(tables))
    texts = [f"# {folder / stem}.toml\n{tomli_w.dumps(tables)}" for stem, tables in files.items()]
    return "\n".join([*(f"    {command}" for command in commands), *texts])


def summary(outcomes: Sequence[CaseResult], seconds: float) -> str:
    """Counts, and refusals by reason. Numbers in a reason do not tell two apart."""
    counts = Counter(outcome.kind for outcome in outcomes)
    shares = [f"{counts[kind]} {kind}" for kind in (EQUAL, REFUSED, FAILED)]
    lines = [f"{len(outcomes)} cases in {seconds:.0f} s: {', '.join(shares)}"]
    reasons = Counter(re.sub(r"\d+", "N", o.what) for o in outcomes if o.kind == REFUSED)
    lines += [f"  refused {count} times: {reason}" for reason, count in reasons.most_common()]
    if counts[REFUSED] > MOST_REFUSED * len(outcomes):
        lines.append(f"more than {MOST_REFUSED:.0%} were refused")
    return "\n".join(lines)


def commit_of_files() -> str | None:
    """The commit of the files that are tested. None if git does not know it."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip() or None


def write_counts(file: Path, outcomes: Sequence[CaseResult], about: dict[str, Any]) -> None:
    """Writes how many cases ended how.

    Args:
        file: The file, such as benchmarks/results/fuzz.json.
        outcomes: Outcomes of all cases.
        about: What else the file says of the run.
    """
    counts = Counter(outcome.kind for outcome in outcomes)
    result = {"cases": len(outcomes)} | {kind: counts[kind] for kind in (EQUAL, REFUSED, FAILED)}
    file.write_text(json.dumps(result | about | {"machine": machine()}) + "\n")


def passed(outcomes: Sequence[CaseResult]) -> bool:
    """True if no case failed and few enough were refused."""
    refused = sum(outcome.kind == REFUSED for outcome in outcomes)
    failed = any(outcome.kind == FAILED for outcome in outcomes)
    return not failed and (refused <= MOST_REFUSED * len(outcomes) or len(outcomes) < 20)
