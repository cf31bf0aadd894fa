"""`dynmo plan --fewest-ranks` for pipelines, meshes, runs and workloads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.plans import answer
from tests.cli.runs import Run, assert_refused


def test_fewest_ranks_of_recorded_costs(plan: Run, costs_file: Path) -> None:
    answered = answer(plan, "--costs", costs_file, "--ranks", 6, "--fewest-ranks", 0.5)
    rows = answered["ranks"]
    assert [row["ranks"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert (answered["global_batch"], answered["full_seconds"]) == (16, rows[-1]["step_seconds"])
    assert answered["limit_seconds"] == 1.5 * answered["full_seconds"]
    fast = [row["ranks"] for row in rows if row["step_seconds"] <= answered["limit_seconds"]]
    assert answered["fewest_ranks"] == min(fast)
    for row in rows:
        assert (row["pipeline"], row["replicas"], row["schedule"]) == (row["ranks"], 1, "1f1b")
        assert row["micro_batch"] * row["microbatches"] == 16
        assert row["speed"] == pytest.approx(answered["full_seconds"] / row["step_seconds"])
        rate = 16 / row["step_seconds"] / row["ranks"]
        assert row["samples_per_second_per_rank"] == pytest.approx(rate)
        assert len(row["memory"]) == row["ranks"]
        assert sum(row["partition"]) == 10
        assert row["best_micro_batch"]["step_seconds"] <= row["step_seconds"]
    options = ("--ranks", 6, "--no-alternatives")
    assert rows[-1]["step_seconds"] <= answer(plan, "--costs", costs_file, *options)["span"]


def test_text_output_names_the_memory_limit(plan: Run, costs_file: Path) -> None:
    def fewest(ranks: int, share: int, limit: str) -> tuple[object, ...]:
        return ("--ranks", ranks, "--fewest-ranks", share, "--memory-limit", limit)

    out = plan("--costs", costs_file, *fewest(5, 9, "100MiB")).good
    assert "1 to 5 ranks, a global batch of 16, at most 100.0 MiB a rank" in out
    assert re.search(r"(?m)^  1: as 1 ranks x 1 replicas.* over the limit of 104857600$", out)
    number = re.search(r"fewest │ +(\d)", out)
    assert number is not None
    assert f"{number[1]} of 5 ranks are enough: a step of " in out
    assert_refused(plan("--costs", costs_file, *fewest(2, 0, "1MiB")), "1048576")


def test_fewest_ranks_of_a_mesh(plan: Run, costs_file: Path) -> None:
    options = ("--costs", costs_file, "--gpus", 4, "--global-batch", 16, "--micro-batch", "2")
    answered = answer(plan, *options, "--fewest-ranks", 0)
    assert answered["fewest_ranks"] == 4
    assert all(row["pipeline"] * row["replicas"] == row["ranks"] for row in answered["ranks"])
    best = answer(plan, *options)["candidates"][0]
    assert answered["ranks"][3]["step_seconds"] == best["step_seconds"]


def test_fewest_ranks_of_a_run(plan: Run, costs_file: Path, tmp_path: Path) -> None:
    """The accumulation groups in the run's config limit the numbers of replicas."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "costs.json").write_bytes(costs_file.read_bytes())
    own = answer(plan, "--costs", folder, "--fewest-ranks", 0.5)
    assert [row["replicas"] for row in own["ranks"]] == [1, 1]
    train = "[train]\nglobal_batch = 16\nmicro_batch = 2\nreduction_slots = 2\n"
    (folder / "config.toml").write_text(f"{train}[parallel]\npipeline = 2\nreplicas = 2\n")
    with_config = answer(plan, "--costs", folder, "--fewest-ranks", 0.5)
    assert [row["ranks"] for row in with_config["ranks"]] == [1, 2, 3, 4]
    assert {row["replicas"] for row in with_config["ranks"]} <= {1, 2}
    assert with_config["global_batch"] == 16
    given = answer(plan, "--costs", folder, "--fewest-ranks", 0.5, "--microbatches", 8)
    assert [row["replicas"] for row in given["ranks"]] == [1, 1], "the command line decides"


def test_fewest_ranks_of_a_workload(plan: Run, tmp_path: Path) -> None:
    path = tmp_path / "workload.toml"
    times = "f = [{0}, {0}, {0}, {0}]\nb = [{0}, {0}, {0}, {0}]\nw = [{0}, {0}, {0}, {0}]\n"
    moments = "".join(
        f"[[layers.moments]]\nstep = {step}\n{times.format(x)}" for step, x in ((0, 1), (20, 0.4))
    )
    path.write_text(f"steps = 40\nranks = 4\nmicrobatches = 8\n[layers]\n{moments}")
    needed = answer(plan, "--costs", path, "--fewest-ranks", 0)["ranks_needed"]
    assert [(row["first"], row["last"]) for row in needed["moments"]] == [(0, 19), (20, 39)]
    assert needed["moments"][0]["ranks"] > needed["moments"][1]["ranks"]
    out = plan("--costs", path, "--fewest-ranks", 0).good
    assert f"needs {needed['mean']:.1f} of 4 ranks on average" in out
