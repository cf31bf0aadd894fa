"""The set-up says what it does, once."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Stands for Python: it makes an environment with itself as the interpreter, and notes its commands.
PYTHON = """#!/bin/sh
if [ "$2" = venv ]; then mkdir -p .venv/bin && cp "$0" .venv/bin/python; else echo "$*" >> notes; fi
"""


def test_set_up_names_each_step_and_runs_once(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    command = ["make", "-C", str(tmp_path), f"PYTHON={python}", "UV=", "--no-print-directory"]

    def parts(stamp: str) -> list[str]:
        output = subprocess.run(
            [*command, f".venv/{stamp}"], capture_output=True, text=True, check=True
        ).stdout
        return re.findall(r"^set-up (.*) \.\.\. \d+ s$", output, re.MULTILINE)

    demo = parts(".demo")
    assert [part.split(":")[0] for part in demo] == [f"{i}/3" for i in (1, 2, 3)]
    for part, word in zip(demo, ("environment", "packages", "compiled loops"), strict=True):
        assert word in part
    notes = tmp_path / "notes"
    assert "dev" not in notes.read_text()
    assert len(parts(".ready")) == 1
    assert "-e .[dev]" in notes.read_text()
    assert parts(".ready") == []
