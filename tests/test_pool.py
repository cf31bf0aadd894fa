"""The pool of ranks outlives a rank."""

from __future__ import annotations

import os

import pytest

import dynmo
from tests.pool import Pool, PoolLost


def end(world: dynmo.World, status: int | None) -> int:
    if status is not None:
        os._exit(status)
    return world.size


@pytest.mark.matrix
def test_job_after_a_lost_rank_gets_new_ranks() -> None:
    pool = Pool(2)
    with pytest.raises(PoolLost, match="status 3"):
        pool.run("tests.test_pool:end", 2, status=3)
    assert pool.run("tests.test_pool:end", 2, status=None) == [2, 2]
    pool.close()
