"""`examples/own_loop.py` on one and on two ranks, stopped and resumed."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.cli.runs import free_port
from tests.pool import Pool

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "own_loop.py"


Row = tuple[tuple[int, ...], str]
"""Placement and weights, as a rank printed them."""


def train(pool: Pool, folder: Path, ranks: int = 1) -> list[Row]:
    """Runs the example, and returns the row of each rank."""
    given = {"path": str(EXAMPLE), "port": free_port(), "arguments": [str(folder)]}
    out = "".join(pool.run("script", ranks, **given))
    rows = re.findall(r"layers \(([\d, ]+)\), weights (\w{64})", out)
    assert len(rows) == ranks, out
    return [
        (tuple(int(x) for x in counts.split(",") if x.strip()), weights) for counts, weights in rows
    ]


@pytest.fixture(scope="module")
def alone(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of an undisturbed run of one rank."""
    ((_, weights),) = train(pool, tmp_path_factory.mktemp("alone") / "saved")
    return weights


@pytest.fixture(scope="module")
def together(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Row], Path]:
    """The rows of a run of two ranks, and the folder of its checkpoint."""
    folder = tmp_path_factory.mktemp("together") / "saved"
    return train(pool, folder, ranks=2), folder


def test_example_loop_is_short_and_imports_dynmo_and_torch_only() -> None:
    text = EXAMPLE.read_text()
    assert len(text.splitlines()) <= 25
    imported = set(re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE))
    assert imported - set(sys.stdlib_module_names) == {"dynmo", "torch"}


def test_two_ranks_train_the_same(alone: str, together: tuple[list[Row], Path]) -> None:
    """Whether a layer moves is measured. Rebalances are tested in test_rebalance.py."""
    rows, _ = together
    assert {weights for _, weights in rows} == {alone}


def test_loaded_run_ends_like_an_uninterrupted_run(
    pool: Pool, alone: str, together: tuple[list[Row], Path]
) -> None:
    _, folder = together
    assert [path.name for path in folder.glob("step-*")] == ["step-000030"]
    assert train(pool, folder)[0][1] == alone
