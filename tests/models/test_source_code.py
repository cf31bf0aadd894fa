"""Digests of a user's files and of what they import."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from dynmo.models.source_code import code_of

MODEL = '''"""A model."""
from torch import nn
import helpers
from parts.norm import Norm

class Gain(nn.Module):
    """A layer."""

    def forward(self, x):
        import late
        return x * helpers.GAIN * late.SHIFT
'''
FILES = {
    "own_model.py": MODEL,
    "helpers.py": "GAIN = 2.0\n",
    "late.py": "SHIFT = 1\n",
    "parts/__init__.py": "",
    "parts/norm.py": "from . import scale\nfrom .scale import root as r\n\nclass Norm: ...\n",
    "parts/scale.py": "def root(x):\n    return x**0.5\n",
    "unused.py": "X = 1\n",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def changed(folder: Path, name: str, old: str, new: str) -> set[str]:
    before = code_of(["own_model"])
    path = folder / name
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    after = code_of(["own_model"])
    return {file for file, _ in before.items() ^ after.items()}


def test_imports_are_followed_without_loading_them(folder: Path) -> None:
    assert set(code_of(["own_model"])) == {*FILES} - {"unused.py"}
    assert "own_model" not in sys.modules


@pytest.mark.parametrize(
    ("counts", "name", "old", "new"),
    [
        (True, "own_model.py", "x * helpers", "x + helpers"),
        (True, "helpers.py", "2.0", "3.0"),
        (True, "late.py", "1", "2"),
        (True, "parts/scale.py", "0.5", "0.25"),
        (True, "parts/__init__.py", "", "import unused"),
        (False, "own_model.py", '"""A layer."""', '"""Another text."""'),
        (False, "own_model.py", "        import late", "        # Late.\n\n        import late"),
        (False, "helpers.py", "GAIN = 2.0", "GAIN  =  (2.0)  # twice"),
        (False, "unused.py", "1", "2"),
    ],
)
def test_changed_constant_counts(folder: Path, counts: bool, name: str, old: str, new: str) -> None:
    """A comment, a docstring or a file that nothing imports does not."""
    found = changed(folder, name, old, new)
    assert name in found if counts else not found


def test_installed_package_counts_by_its_version(folder: Path) -> None:
    (folder / "uses.py").write_text("import numpy\nimport torch, json\nimport safetensors.torch\n")
    code = code_of(["uses"])
    assert set(code) == {"uses.py", "numpy", "safetensors"}
    assert code["numpy"] == np.__version__


def test_file_that_is_no_python_counts_by_its_bytes(folder: Path) -> None:
    (folder / "broken.py").write_text("this is no Python")
    before = code_of(["broken", "nowhere", "nowhere.at_all"])
    (folder / "broken.py").write_text("this is no python.")
    assert set(before) == {"broken.py"}
    assert code_of(["broken"]) != before
