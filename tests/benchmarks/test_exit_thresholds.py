"""The speed limit in the benchmark of exit thresholds."""

from __future__ import annotations

import pytest

from benchmarks.exit_thresholds import BLOCKS, EXITS, limit
from benchmarks.quality import config_of


def test_speed_limit_follows_the_exit_shares() -> None:
    case = {"cases": ["early_exit"], "early_exit": {"exits": list(EXITS)}}
    config = config_of(10, 0, case, 1, 1, 64, {"blocks": BLOCKS})
    assert limit(config, [0.0, 0.0]) < 1, "exits alone cost"
    shares = [limit(config, [share, 0.0]) for share in (0.2, 0.5, 1.0)]
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1.75, abs=0.5), (
        "keys and values of five of eight blocks remain"
    )
