"""What import-linter cannot see: a package that its list forgets, and what really loads."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
LAYERS, _, PURE = CONTRACTS["contracts"]


def test_every_package_has_a_layer() -> None:
    listed = {name for line in LAYERS["layers"] for name in line.split(" : ")}
    files = [path for path in (ROOT / "dynmo").glob("[!_]*") if path.suffix in ("", ".py")]
    assert {f"dynmo.{path.stem}" for path in files} == {
        ".".join(name.split(".")[:2]) for name in listed if name != "dynmo.__main__"
    }


@pytest.mark.parametrize(
    "names", [PURE["source_modules"], ["dynmo.cli"]], ids=["pure packages", "command line"]
)
def test_modules_load_without_torch(names: list[str]) -> None:
    code = (
        f"import sys, importlib\nfor n in {names!r}: importlib.import_module(n)\n"
        f"sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0
