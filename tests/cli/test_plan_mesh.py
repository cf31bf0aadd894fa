"""`dynmo plan --gpus`: the mesh search."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.plans import FIELDS, answer
from tests.cli.runs import Run, assert_refused


def test_json_fields_and_candidates(plan: Run, costs_file: Path) -> None:
    options = ("--costs", costs_file, "--gpus", 4, "--global-batch", 32, "--schedule", "zb-h1")
    more = ("--bandwidth", "1GB", "--micro-batch", "1,2", "--zero", 1)
    answered = answer(plan, *options, *more)
    own = ["gpus", "global_batch", "zero", "bandwidth", "mesh", "candidates", "refused", "slower"]
    assert list(answered) == [*FIELDS, *own]
    best, candidates = answered["mesh"], answered["candidates"]
    assert candidates[0] == best
    assert {(x["pipeline"], x["replicas"]) for x in candidates} == {(1, 4), (2, 2), (4, 1)}
    assert [x["step_seconds"] for x in candidates] == sorted(x["step_seconds"] for x in candidates)
    assert all(x["replicas"] * x["microbatches"] * x["micro_batch"] == 32 for x in candidates)
    assert best["samples_per_second"] == pytest.approx(32 / best["step_seconds"])
    assert best["step_seconds"] == pytest.approx(answered["span"] + best["exposed"])
    assert (answered["partition"], answered["memory"]) == (best["partition"], best["memory"])
    assert (answered["ranks"], answered["microbatches"]) == (best["pipeline"], best["microbatches"])
    assert answered["bandwidth"] == 1e9
    assert answer(plan, *options)["bandwidth"] == 1e10, "the slowest link of the file"


def test_text_output(plan: Run, costs_file: Path) -> None:
    options = ("--gpus", 6, "--global-batch", 24, "--memory-limit", "120MiB", "--schedule", "1f1b")
    out = plan("--costs", costs_file, *options, "--megatron").good
    assert "6 GPUs, a global batch of 24, at most 120.0 MiB a rank" in out
    assert "bytes, 2097152 over the limit" in out
    words = ("best: ", "candidates", "against best", "sequences a second", "refused, such as ")
    assert all(word in out for word in [*words, "pipeline_model_parallel_layout"])


def test_unknown_bandwidth_is_reported(plan: Run, tmp_path: Path, costs_file: Path) -> None:
    path = tmp_path / "hand.json"
    path.write_text('{"f": [1, 1], "b": [1, 1], "w": [1, 1], "microbatch": 1}')
    options, said = ("--gpus", 2, "--global-batch", 4), "no bandwidth was measured"
    assert said in plan("--costs", path, *options).out
    assert said not in plan("--costs", path, *options, "--bandwidth", "1GB").out
    assert said not in plan("--costs", costs_file, *options).out
    assert answer(plan, "--costs", path, *options)["bandwidth"] is None


def test_tiny_bandwidth_rules_out_replicas(plan: Run, costs_file: Path) -> None:
    options = ("--costs", costs_file, "--bandwidth", "1e-320")
    answered = answer(plan, *options, "--gpus", 2, "--global-batch", 4, "--micro-batch", 2)
    assert {x["replicas"] for x in answered["candidates"]} == {1}
    assert_refused(plan(*options, "--gpus", 11, "--global-batch", 22), "1e-320")
