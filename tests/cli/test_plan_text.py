"""A plan as bars, and exported to other trainers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.plans import answer
from tests.cli.runs import Run


def test_plan_exports_to_other_trainers(plan: Run, costs_file: Path) -> None:
    options = ("--costs", costs_file, "--balancer", "uniform", "--no-alternatives")
    exported = answer(plan, *options)["words"]
    assert exported["megatron"] == {"pipeline_model_parallel_layout": "Ett|ttL", "rounded": []}
    first = exported["torchtitan"]["module_fqns_per_model_part"][0]
    assert first == ["tok_embeddings", "layers.0", "layers.1"]
    assert exported["deepspeed"] == {"parts": [0, 5, 10]}
    out = plan(*options, "--megatron", "--torchtitan", "--deepspeed").out
    assert "pipeline_model_parallel_layout = Ett|ttL" in out
    assert '["tok_embeddings", "layers.0", "layers.1"]' in out
    assert "parts = [0, 5, 10]" in out
    assert "parts" not in plan(*options).out


def test_impossible_export_names_its_problem(plan: Run, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    times = {key: [1] * 3 for key in "fbw"}
    path.write_text(json.dumps({**times, "names": ["blocks.0", "odd", "blocks.1"]}))
    options = ("--ranks", 2, "--microbatches", 4, "--no-alternatives")
    exported = answer(plan, "--costs", path, *options)["words"]
    assert "odd" in exported["megatron"]["problem"]
    assert exported["deepspeed"]["parts"][-1] == 3


def test_every_stage_of_a_rank_has_a_bar(plan: Run, costs_file: Path) -> None:
    out = plan("--costs", costs_file, "--schedule", "zb-v", "--no-alternatives").out
    bars = [line for line in out.splitlines() if line.startswith("rank ")]
    assert [bar.split()[:4] for bar in bars] == [
        ["rank", str(r), "stage", str(s)] for r, s in ((0, 0), (0, 3), (1, 1), (1, 2))
    ]


@pytest.mark.parametrize(
    "mesh", [("--ranks", 2, "--microbatches", 4), ("--gpus", 2, "--global-batch", 4)]
)
def test_markup_in_names_is_printed_literally(
    plan: Run, tmp_path: Path, mesh: tuple[object, ...]
) -> None:
    path = tmp_path / "costs.json"
    costs = {key: [1] * 4 for key in ("f", "b", "w", "output_bytes")}
    costs |= {"names": [f"[bold]{i}[/x]" for i in range(4)], "activation_bytes": [1 << 20] * 4}
    path.write_text(json.dumps({**costs, "microbatch": 1}))
    options = ("--costs", path, "--recompute", "all")
    assert "[bold]0[/x]" in plan(*options, *mesh).good
