"""The figures that a recorded load gives."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.experts import BLOCKS
from benchmarks.router_loads import (
    EXPERTS,
    RECORDED,
    REPLICAS,
    WINDOW,
    Loads,
    counts_of,
    drift,
    exponent_of,
    spread_of,
    summed,
)

STEPS = 2 * REPLICAS * WINDOW + 3


def drawn(seed: int = 0) -> Loads:
    return np.random.default_rng(seed).integers(50, 200, (STEPS, RECORDED, EXPERTS))


def test_replicas_of_a_moment_have_the_tokens_of_windows_in_a_row() -> None:
    loads = drawn()
    moments = counts_of(loads)
    assert len(moments) == 2
    assert {len(moment) for moment in moments} == {BLOCKS}
    last = loads[WINDOW * (2 * REPLICAS - 1) : WINDOW * 2 * REPLICAS].sum(0)
    assert moments[1][-1][-1] == last[-1].tolist()
    assert moments[1][0][-1] == moments[1][BLOCKS // RECORDED - 1][-1] == last[0].tolist()


def test_spread_is_over_the_mean_expert() -> None:
    assert spread_of(np.array([[[1, 2, 3]], [[3, 3, 3]]])) == pytest.approx(
        {"hottest": 1.25, "coldest": 0.75, "difference": 0.5}
    )
    assert summed(np.ones((7, 1, 2), dtype=np.int64), 3).tolist() == [[[3, 3]], [[3, 3]]]


def test_drift_of_a_load_that_stays_turns_and_is_even() -> None:
    stays = np.tile(np.arange(EXPERTS), (STEPS, RECORDED, 1))
    assert drift(stays, 10) == pytest.approx(1)
    halves = np.concatenate([stays[: STEPS // 2 + 40], stays[STEPS // 2 + 40 :, :, ::-1]])
    assert drift(halves, 50) == pytest.approx(-1)
    assert drift(np.ones_like(stays), 10) is None
    assert drift(stays, STEPS) is None


def test_exponent_of_zipfs_law() -> None:
    shares = np.arange(1, EXPERTS + 1) ** -0.6
    assert exponent_of(float(shares.max() / shares.mean())) == pytest.approx(0.6)
    assert exponent_of(1.0) == pytest.approx(0)
