"""Every configuration in `examples/` is valid."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynmo.config import load

FOLDER = Path(__file__).parents[2] / "examples"
# `dynmo simulate` reads the workload (tests/cli/test_simulate.py).
RUNS = [path for path in sorted(FOLDER.glob("*.toml")) if path.name != "workload.toml"]


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)
def test_example_configurations_are_valid(path: Path) -> None:
    config = load(path)
    assert config.ranks <= 4
    assert config.train.steps > 0
