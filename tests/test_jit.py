"""Loops compiled by numba, and the code that is kept of them."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

LOOPS = """
from dynmo.jit import jit

@jit()
def doubled(x):
    return 2 * x
"""


def test_index_that_cannot_be_read_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names a class that is gone, as that of another version does."""
    (tmp_path / "loops_of_a_test.py").write_text(LOOPS)
    monkeypatch.syspath_prepend(tmp_path)
    loops = importlib.import_module("loops_of_a_test")
    assert loops.doubled(2) == 4
    [index] = tmp_path.rglob("*.nbi")
    good = index.read_bytes()
    index.write_bytes(good[: good.index(b"\x94.") + 2] + b"cno_module\nGone\n.")
    for _ in range(2):
        loops = importlib.reload(loops)
        assert loops.doubled(2) == 4
    assert sum(loops.doubled.stats.cache_hits.values()) == 1
