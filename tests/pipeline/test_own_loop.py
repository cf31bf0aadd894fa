"""`examples/own_loop.py` alone and on two ranks.

It is stopped and loaded, balanced and not.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.processes import run_script

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "own_loop.py"


def train(script: Path, folder: Path, ranks: int = 1) -> list[tuple[tuple[int, ...], str]]:
    """Runs the script, and returns placement and weights as each rank printed them."""
    out = run_script(script, str(folder), ranks=ranks)
    rows = re.findall(r"layers \(([\d, ]+)\), weights (\w{64})", out)
    assert len(rows) == ranks, out
    return [
        (tuple(int(x) for x in counts.split(",") if x.strip()), weights) for counts, weights in rows
    ]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of an undisturbed run of one rank."""
    ((_, weights),) = train(EXAMPLE, tmp_path_factory.mktemp("alone") / "saved")
    return weights


def test_it_is_short_and_needs_dynmo_and_torch_only() -> None:
    text = EXAMPLE.read_text()
    assert len(text.splitlines()) <= 26
    imported = set(re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE))
    assert imported - set(sys.stdlib_module_names) == {"dynmo", "torch"}


def test_two_ranks_rebalance_by_themselves_and_train_the_same(alone: str, tmp_path: Path) -> None:
    rows = train(EXAMPLE, tmp_path / "saved", ranks=2)
    assert {weights for _, weights in rows} == {alone}
    # The wide layers are at the end, so the first rank takes more of the others.
    assert all(counts[0] > 5 for counts, _ in rows)


def test_a_run_that_is_loaded_ends_like_one_that_was_not_stopped(
    alone: str, tmp_path: Path
) -> None:
    folder = tmp_path / "saved"
    train(EXAMPLE, folder, ranks=2)
    assert [path.name for path in folder.glob("step-*")] == ["step-000030"]
    assert train(EXAMPLE, folder, ranks=1)[0][1] == alone
    shutil.rmtree(folder)


def test_it_trains_the_same_without_balancing(alone: str, tmp_path: Path) -> None:
    script = tmp_path / "loop.py"
    script.write_text(EXAMPLE.read_text().replace('balance="auto"', 'balance="none"'))
    rows = train(script, tmp_path / "saved", ranks=2)
    assert rows == [((5, 4), alone)] * 2
