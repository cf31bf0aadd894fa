"""The benchmark of thresholds: its limit and its table."""

from __future__ import annotations

import pytest

from benchmarks.exit_thresholds import BLOCKS, EXITS, limit, table
from benchmarks.quality import config_of


def test_the_limit() -> None:
    case = {"cases": ["early_exit"], "early_exit": {"exits": list(EXITS)}}
    config = config_of(10, 0, case, 1, 1, 64, {"blocks": BLOCKS})
    assert limit(config, [0.0, 0.0]) < 1, "exits alone cost"
    shares = [limit(config, [share, 0.0]) for share in (0.2, 0.5, 1.0)]
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1.75, abs=0.5), (
        "keys and values of five of eight blocks remain"
    )


def test_the_table() -> None:
    row = {"threshold": 0.5, "exited": [0.25, 0.1], "loss": 2.5, "speedup": 1.2, "limit": 1.3}
    assert "| 0.5 | 25%, 10% | 2.500 | x1.20 | x1.30 |" in table(
        {"loss_without_exits": 2.4, "rows": [row]}
    )
