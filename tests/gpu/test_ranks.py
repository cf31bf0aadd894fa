"""Ranks over NCCL, or over gloo on one GPU, train the same as one rank, bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from dynmo.config import parse
from tests.equality import RANDOM_MOVES
from tests.jobs import SOURCE
from tests.processes import gone, ranks, start, wait_until

TRAIN = {"steps": 8, "global_batch": 16, "micro_batch": 2, "lr": 1e-3, "deterministic": True}
CONFIG = {
    "data": {"source": SOURCE},
    "model": {"blocks": 4, "hidden": 128, "heads": 4, "sequence": 64, "dropout": 0.1},
    "train": TRAIN | {"reduction_slots": 2},
    "balance": {"balancer": RANDOM_MOVES, "every": 1},
    "dynamism": {"cases": ["freezing"], "freezing": {"schedule": [[3, 3]]}},
}


class Ranks(NamedTuple):
    """How many processes a test may have, and how their messages travel."""

    device: str
    backend: str
    size: int


def begin(
    folder: Path, name: str, options: dict[str, Any], on: Ranks, pipeline: int, **parallel: Any
) -> subprocess.Popen[str]:
    mesh = {"device": on.device, "backend": on.backend, "timeout": 60.0, "pipeline": pipeline}
    config = parse(CONFIG | options | {"name": name, "parallel": mesh | parallel})
    (folder / f"{name}.toml").write_text(config.to_toml())
    environment = {"PYTHONWARNINGS": "default"}  # another machine's packages may warn
    if on.backend == "gloo" or on.size == 1:  # no kernel of ranks waits on the device
        environment["CUDA_MODULE_LOADING"] = "LAZY"
    return start([sys.executable, "-m", "dynmo", "train", f"{name}.toml"], folder, environment)


def digest(
    folder: Path,
    schedule: str,
    on: Ranks,
    pipeline: int,
    replicas: int,
    zero: int = 0,
    expert: int = 1,
    **options: Any,
) -> str:
    """The digest of the weights. Layers move at every step and freeze."""
    name = f"{schedule}-{pipeline}x{replicas}x{expert}"
    options |= {"pipeline": {"schedule": schedule}}
    process = begin(
        folder, name, options, on, pipeline, replicas=replicas, zero=zero, expert=expert
    )
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    last = (folder / "runs" / name / "events.jsonl").read_text().splitlines()[-1]
    return json.loads(last)["weights_digest"]


@pytest.fixture(params=["nccl", "gloo"])
def on(request: pytest.FixtureRequest, device: torch.device) -> Ranks:
    """Two ranks at least, four at most."""
    if device.type == "cpu":
        if request.param == "nccl":
            pytest.skip("NCCL has no ranks on CPU")
        return Ranks("cpu", "gloo", 2)
    if request.param == "gloo":
        return Ranks("cuda", "gloo", 4)
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL refuses two ranks on one GPU")
    return Ranks("cuda", "auto", min(4, torch.cuda.device_count()))


@pytest.fixture(scope="module")
def alone(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> str:
    device = str(pytestconfig.getoption("--gpu-device"))
    return digest(tmp_path_factory.mktemp("alone"), "1f1b", Ranks(device, "auto", 1), 1, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
def test_a_pipeline_trains_the_same(on: Ranks, alone: str, tmp_path: Path, schedule: str) -> None:
    assert digest(tmp_path, schedule, on, on.size, 1) == alone


@pytest.mark.gpu
def test_replicas_train_the_same(on: Ranks, alone: str, tmp_path: Path) -> None:
    """The replicas share the optimizer state."""
    assert digest(tmp_path, "zb-h1", on, on.size // 2, 2, zero=1) == alone


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
def test_compiled_ranks_train_the_same(on: Ranks, tmp_path: Path) -> None:
    """Ranks must not choose different splits of a sum."""
    train = CONFIG["train"] | {"compile": True}
    wanted = digest(tmp_path, "1f1b", on, 1, 1, train=train)
    assert digest(tmp_path, "zb-h1", on, on.size, 1, train=train) == wanted


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("step", "replicas", "options"), [(3, 2, {}), (2, 1, {"park": True}), (2, 1, {"park": False})]
)
def test_changing_meshes_train_the_same(
    on: Ranks, alone: str, tmp_path: Path, step: int, replicas: int, options: dict[str, bool]
) -> None:
    """A run returns to its first shape. It uses old channels again, or rebuilds its groups."""
    elastic = {"reshape_at": [[step, on.size // 2, replicas], [5, on.size, 1]]} | options
    assert digest(tmp_path, "zb-h1", on, on.size, 1, elastic=elastic) == alone


@pytest.mark.gpu
def test_hanging_rank_is_named_and_all_ranks_end(on: Ranks, tmp_path: Path) -> None:
    train = CONFIG["train"] | {"steps": 100_000}
    process = begin(tmp_path, "hangs", {"train": train, "dynamism": {}}, on, 2, timeout=10.0)
    log = tmp_path / "runs" / "hangs" / "events.jsonl"
    wait_until(lambda: log.exists() and log.read_text().count('"step"') > 3, 60)
    os.kill(ranks(tmp_path)[1], signal.SIGSTOP)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "rank 0 waited" in errors
    assert "for rank 1: " in errors
    wait_until(lambda: gone(tmp_path), 10)
