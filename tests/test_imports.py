"""What import-linter cannot see: a package that its list forgets, and what really loads."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

from dynmo.cli import COMMANDS

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
    """`import dynmo` loads next to nothing. The pure packages and the commands load no torch."""
    names = [*PURE["source_modules"], *(f"dynmo.cli.{name}" for name in COMMANDS)]
    assert in_process(
        "import sys, importlib, dynmo\n"
        "print(sorted({'torch', 'numpy', 'pydantic', 'dynmo.errors'} & sys.modules.keys()))\n"
        f"for n in {names!r}: importlib.import_module(n)\n"
        "print('torch' in sys.modules)"
    ) == ["[]", "False"]


def test_help_loads_no_large_package() -> None:
    """Typer loads pydantic for the help of a command with options."""
    light = ("train", "data", "profile", "report", "checkpoint")
    planning = ("plan", "schedule", "simulate")
    *_, first, second, third = in_process(
        "import sys\n"
        "from dynmo.cli import main\n"
        "large = {'torch', 'numba', 'numpy'}\n"
        "main(['--help'])\n"
        "first = sorted({*large, 'pydantic'} & sys.modules.keys())\n"
        f"for name in {light!r}: main([name, '--help'])\n"
        "second = sorted(large & sys.modules.keys())\n"
        f"for name in {planning!r}: main([name, '--help'])\n"
        "print(first, second, 'numba' in sys.modules, sep='\\n')"
    )
    assert (first, second, third) == ("[]", "[]", "False")


def in_process(code: str) -> list[str]:
    """Runs Python code in a process of its own. Returns the lines that it prints."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.splitlines()
