"""The benchmark of model quality: valid runs and fair comparisons."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.quality import SHARED, STEPS, chosen, compare, config_of, runs
from tests.pool import Pool


@pytest.mark.parametrize("steps", [40, STEPS])
def test_every_run_is_valid_and_differs_only_in_its_case(steps: int) -> None:
    configs = {
        name: config_of(steps, 0, dynamism, 24, 4) for name, (_, _, dynamism) in runs(steps).items()
    }
    dense = configs["dense"]
    assert dense.dynamism.cases == ()
    for name, config in configs.items():
        assert config.model_copy(update={"dynamism": dense.dynamism}) == dense
        assert (name == "dense") == (config.dynamism == dense.dynamism)


def results() -> dict[str, dict[str, Any]]:
    losses = {name: 2.0 + 0.01 * i for i, name in enumerate(runs(40))}
    return {
        name: {"curve": [[8, 3.0], [40, loss]], "changes": [[3, "acted"]], "digest": name}
        for name, loss in losses.items()
    }


def test_distances_are_to_the_right_reference() -> None:
    given = results()
    rows = {row["name"]: row for row in compare(given, 40)}
    assert rows["dense"]["distance"] == 0
    assert rows["pruning, 90 %"]["distance"] == pytest.approx(2.06 / 2.0 - 1)
    assert rows["hash, 4 buckets, all blocks"]["distance"] == pytest.approx(2.09 / 2.07 - 1)
    assert rows[SHARED]["within"] is None
    given["pruning, 50 %"]["curve"][-1][1] = 2.05
    late = {row["name"]: row for row in compare(given, 40)}["pruning, 50 %"]
    assert late["limit"] == 0.02
    assert not late["within"]


def test_selected_runs_include_their_references() -> None:
    assert chosen(40, ()) == runs(40)
    assert list(chosen(40, ["pruning, 90 %"])) == ["dense", "pruning, 90 %"]
    hashed = "hash, 4 buckets, all blocks"
    assert list(chosen(40, [hashed])) == ["dense", SHARED, hashed]
    some = {name: run for name, run in results().items() if name in chosen(40, ["pruning, 90 %"])}
    assert [row["name"] for row in compare(some, 40)] == ["dense", "pruning, 90 %"]


@pytest.mark.matrix
def test_small_run_gives_a_row(pool: Pool) -> None:
    dynamism = {"cases": ["freezing"], "freezing": {"schedule": [[1, 5]]}}
    size = {"steps": 4, "seed": 0, "evaluations": 2, "batches": 1, "hidden": 64}
    (row,) = pool.run("benchmarks.quality:train", 1, dynamism=dynamism, **size)
    assert [step for step, _ in row["curve"]] == [2, 4]
    assert [step for step, _ in row["changes"]] == [1]
