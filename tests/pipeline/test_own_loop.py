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


SHORTER = {"(512, 64": "(8, 64", "steps, 40)": "steps, 12)", "step == 29": "step == 8"}


def train(pool: Pool, folder: Path, ranks: int = 1) -> list[str]:
    """Runs a short version of the example. Returns the digest of each rank's weights."""
    text = EXAMPLE.read_text()
    for usual, shorter in SHORTER.items():
        assert usual in text
        text = text.replace(usual, shorter)
    script = folder.with_name("own_loop.py")
    script.write_text(text)
    given = {"path": str(script), "port": free_port(), "arguments": [str(folder)]}
    out = "".join(pool.run("script", ranks, **given))
    rows = re.findall(r"layers \([\d, ]+\), weights (\w{64})", out)
    assert len(rows) == ranks, out
    return rows


@pytest.fixture(scope="module")
def alone(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of an undisturbed run of one rank."""
    (weights,) = train(pool, tmp_path_factory.mktemp("alone") / "saved")
    return weights


@pytest.fixture(scope="module")
def together(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    """The weights of a run of two ranks, and the folder of its checkpoint."""
    folder = tmp_path_factory.mktemp("together") / "saved"
    return train(pool, folder, ranks=2), folder


def test_example_loop_is_short_and_imports_dynmo_and_torch_only() -> None:
    text = EXAMPLE.read_text()
    assert len(text.splitlines()) <= 25
    imported = set(re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE))
    assert imported - set(sys.stdlib_module_names) == {"dynmo", "torch"}


def test_two_ranks_train_the_same(alone: str, together: tuple[list[str], Path]) -> None:
    """Whether a layer moves is measured. Rebalances are tested in test_rebalance.py."""
    assert set(together[0]) == {alone}


def test_loaded_run_ends_like_an_uninterrupted_run(
    pool: Pool, alone: str, together: tuple[list[str], Path]
) -> None:
    _, folder = together
    assert [path.name for path in folder.glob("step-*")] == ["step-000009"]
    assert train(pool, folder) == [alone]
