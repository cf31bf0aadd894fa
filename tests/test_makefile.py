"""The set-up says what it does, once."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Stands for Python: it makes an environment with itself as the interpreter.
PYTHON = """#!/bin/sh
if [ "$2" = venv ]; then mkdir -p .venv/bin && cp "$0" .venv/bin/python; fi
"""


def test_set_up_names_each_step_and_runs_once(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    command = ["make", "-C", str(tmp_path), f"PYTHON={python}", "--no-print-directory"]
    command.append(".venv/.ready")
    first, second = (
        subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(2)
    )
    lines = first.splitlines()
    assert [line.split(":")[0] for line in lines] == [f"set-up {i}/3" for i in (1, 2, 3)]
    for line, word in zip(lines, ("environment", "packages", "compiled loops"), strict=True):
        assert word in line
    assert "set-up" not in second
