"""A run that starts again on the ranks that are left."""

from __future__ import annotations

from typing import Any

import pytest

from dynmo.cli.run_folder import on_ranks_left
from dynmo.config import parse
from dynmo.errors import RunError


def config(pipeline: int, replicas: int, **train: Any) -> dict[str, Any]:
    return {
        "model": {"blocks": 2},
        "train": {"global_batch": 8, "micro_batch": 1, **train},
        "parallel": {"pipeline": pipeline, "replicas": replicas},
    }


@pytest.mark.parametrize(
    ("mesh", "left", "wanted"),
    [
        ((2, 2), 4, (2, 2)),
        ((2, 2), 9, (2, 2)),
        ((2, 2), 3, (3, 1)),
        ((2, 2), 2, (1, 2)),
        ((2, 4), 6, (3, 2)),  # three replicas cannot share eight microbatches
        ((4, 1), 3, (3, 1)),
        ((4, 1), 1, (1, 1)),
    ],
)
def test_run_takes_as_many_ranks_as_work(
    mesh: tuple[int, int], left: int, wanted: tuple[int, int]
) -> None:
    before = parse(config(*mesh))
    after = on_ranks_left(before, left)
    assert (after.parallel.pipeline, after.parallel.replicas) == wanted
    groups = before.options.accumulation_groups
    assert after.options.accumulation_groups == groups, "or sums have other bits"


def test_replicas_of_slices() -> None:
    parallel = {"pipeline": 3, "replicas": 2, "slices": True}
    after = on_ranks_left(parse(config(3, 2) | {"parallel": parallel}), 1)
    assert (after.parallel.pipeline, after.parallel.replicas) == (3, 1)


def test_no_rank_is_left() -> None:
    with pytest.raises(RunError, match=r"^0 of 4 ranks are left$"):
        on_ranks_left(parse(config(2, 2)), 0)


def test_run_that_works_on_no_smaller_mesh() -> None:
    given = config(2, 2) | {"elastic": {"reshape": True}}
    line = r"^1 of 4 ranks are left; no smaller mesh works: .*elastic.reshape = true"
    with pytest.raises(RunError, match=line):
        on_ranks_left(parse(given), 1)
