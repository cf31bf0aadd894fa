"""A case that packs weights in a form of its own: `examples/block_sparse.py`."""

from __future__ import annotations

import re
from pathlib import Path

from tests.cli.runs import free_port
from tests.pool import Pool

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "block_sparse.py"


def test_packed_layers_move_and_resume_on_other_ranks(pool: Pool, tmp_path: Path) -> None:
    def weights(ranks: int, name: str, steps: int) -> str:
        arguments = [str(tmp_path / name), str(steps)]
        printed = pool.run(
            "script", ranks, path=str(EXAMPLE), port=free_port(), arguments=arguments
        )
        (digest,) = {*re.findall(r"weights (\w{64})", "".join(printed))}
        return digest

    at_start, whole = weights(1, "start", 2), weights(1, "whole", 8)
    moved = weights(2, "moved", 5)
    assert moved == weights(1, "alone", 5) != at_start
    assert weights(3, "moved", 7) == weights(1, "alone", 7)
    assert weights(1, "moved", 8) == whole


def test_guide_shows_the_example() -> None:
    page = (ROOT / "docs" / "how-to" / "own-case.md").read_text()
    shown = re.findall(r"```python\n(.*?)```", page.partition("## Layers whose")[2], re.DOTALL)
    assert len(shown) == 2
    assert all(part.strip() in EXAMPLE.read_text() for part in shown)
