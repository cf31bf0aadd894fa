"""What import-linter cannot see: a package that its list forgets, and what really loads."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
LAYERS, _, PURE, *_ = CONTRACTS["contracts"]


def test_every_package_has_a_layer() -> None:
    listed = {name for line in LAYERS["layers"] for name in line.split(" : ")}
    files = [path for path in (ROOT / "dynmo").glob("[!_]*") if path.suffix in ("", ".py")]
    assert {f"dynmo.{path.stem}" for path in files} == {
        ".".join(name.split(".")[:2]) for name in listed if name != "dynmo.__main__"
    }


def test_modules_load_without_torch() -> None:
    """`import dynmo` loads next to nothing. The pure packages and the command load no torch."""
    code = (
        "import sys, importlib, dynmo\n"
        "print(sorted({'torch', 'numpy', 'pydantic', 'dynmo.errors'} & sys.modules.keys()))\n"
        f"for n in {[*PURE['source_modules'], 'dynmo.cli']!r}: importlib.import_module(n)\n"
        "print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\nFalse\n"
