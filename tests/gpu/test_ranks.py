"""Ranks of one GPU each, over NCCL: what one GPU trains by itself, to the last bit."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dynmo.config import parse, to_toml
from tests.processes import start

DEVICE = "cuda"
CONFIG = {
    "model": {"blocks": 4, "hidden": 128, "heads": 4, "sequence": 64, "dropout": 0.1},
    "train": {"steps": 8, "global_batch": 16, "micro_batch": 2, "lr": 1e-3, "deterministic": True, "reduction_slots": 2},
    "balance": {"balancer": "random", "every": 1},
    "dynamism": {"cases": ["freezing"], "freezing": {"schedule": [[3, 3]]}},
}


def digest(folder: Path, schedule: str, pipeline: int, data: int, **options: Any) -> str:
    """Of the weights. Layers move at every step and freeze; options: more of `[parallel]`."""
    name = f"{schedule}-{pipeline}x{data}"
    parallel = {"device": DEVICE, "pipeline": pipeline, "data": data, "timeout": 120.0, **options}
    config = parse(CONFIG | {"name": name, "parallel": parallel, "pipeline": {"schedule": schedule}})
    (folder / f"{name}.toml").write_text(to_toml(config))
    process = start([sys.executable, "-m", "dynmo", "train", f"{name}.toml"], folder)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    last = (folder / "runs" / name / "events.jsonl").read_text().splitlines()[-1]
    return json.loads(last)["weights_digest"]


@pytest.fixture
def gpus() -> int:
    """As many ranks as a test may have: two at least, four at most."""
    if DEVICE == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs: NCCL refuses two ranks on one")
    return min(4, torch.cuda.device_count()) if DEVICE == "cuda" else 4


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
def test_a_pipeline_trains_the_same(gpus: int, tmp_path: Path, schedule: str) -> None:
    assert digest(tmp_path, schedule, gpus, 1) == digest(tmp_path, "1f1b", 1, 1)


@pytest.mark.gpu
def test_replicas_train_the_same(gpus: int, tmp_path: Path) -> None:
    """With an optimizer that they share."""
    assert digest(tmp_path, "zb-h1", gpus // 2, 2, zero=1) == digest(tmp_path, "1f1b", 1, 1)
