"""Ranks of one GPU each, over NCCL: what one GPU trains by itself, to the last bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dynmo.config import parse, to_toml
from tests.processes import gone, ranks, start, wait_until

DEVICE = "cuda"
CONFIG = {
    "model": {"blocks": 4, "hidden": 128, "heads": 4, "sequence": 64, "dropout": 0.1},
    "train": {"steps": 8, "global_batch": 16, "micro_batch": 2, "lr": 1e-3, "deterministic": True, "reduction_slots": 2},
    "balance": {"balancer": "random", "every": 1},
    "dynamism": {"cases": ["freezing"], "freezing": {"schedule": [[3, 3]]}},
}


def begin(folder: Path, name: str, options: dict[str, Any], parallel: dict[str, Any]) -> subprocess.Popen[str]:
    config = parse(CONFIG | options | {"name": name, "parallel": {"device": DEVICE, "timeout": 120.0} | parallel})
    (folder / f"{name}.toml").write_text(to_toml(config))
    return start([sys.executable, "-m", "dynmo", "train", f"{name}.toml"], folder)


def digest(folder: Path, schedule: str, pipeline: int, data: int, zero: int = 0, **options: Any) -> str:
    """Of the weights. Layers move at every step and freeze; options: other sections."""
    name = f"{schedule}-{pipeline}x{data}"
    parallel = {"pipeline": pipeline, "data": data, "zero": zero}
    process = begin(folder, name, {"pipeline": {"schedule": schedule}} | options, parallel)
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


@pytest.mark.gpu
def test_compiled_ranks_train_the_same(gpus: int, tmp_path: Path) -> None:
    """No rank chooses for itself how a sum is split."""
    train = CONFIG["train"] | {"compile": True}
    assert digest(tmp_path, "zb-h1", gpus, 1, train=train) == digest(tmp_path, "1f1b", 1, 1, train=train)


@pytest.mark.gpu
def test_a_mesh_that_comes_and_goes_trains_the_same(gpus: int, tmp_path: Path) -> None:
    """The first shape twice, the second time over the channels it had."""
    elastic = {"reshape_at": [[3, gpus // 2, 2], [5, gpus, 1]]}
    assert digest(tmp_path, "zb-h1", gpus, 1, elastic=elastic) == digest(tmp_path, "1f1b", 1, 1)


@pytest.mark.gpu
def test_a_rank_that_hangs(gpus: int, tmp_path: Path) -> None:
    """Who waits says for whom, though no wait of a stream ever raises, and everyone ends."""
    train = CONFIG["train"] | {"steps": 100_000}
    process = begin(tmp_path, "hangs", {"train": train, "dynamism": {}}, {"pipeline": 2, "timeout": 10.0})
    log = tmp_path / "runs" / "hangs" / "events.jsonl"
    wait_until(lambda: log.exists() and log.read_text().count('"step"') > 3, 120)
    os.kill(ranks(tmp_path)[1], signal.SIGSTOP)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "rank 0 waited 10 s for rank 1: " in errors
    wait_until(lambda: gone(tmp_path), 10)
