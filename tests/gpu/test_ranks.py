"""Ranks in several processes train the same as one rank, bit for bit.

They use NCCL on several GPUs, and gloo on one GPU.
"""

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

CONFIG = {
    "data": {"source": SOURCE},
    "model": {"blocks": 4, "hidden": 128, "heads": 4, "sequence": 64, "dropout": 0.1},
    "train": {
        "steps": 8,
        "global_batch": 16,
        "micro_batch": 2,
        "lr": 1e-3,
        "deterministic": True,
        "reduction_slots": 2,
    },
    "balance": {"balancer": RANDOM_MOVES, "every": 1},
    "dynamism": {"cases": ["freezing"], "freezing": {"schedule": [[3, 3]]}},
}
# Another machine's packages may warn. No kernel of ranks over gloo waits on the device, so modules
# may be loaded late.
ENVIRONMENT = {"PYTHONWARNINGS": "default", "CUDA_MODULE_LOADING": "LAZY"}


class Ranks(NamedTuple):
    """How many processes a test may have, and how their messages travel."""

    device: str
    backend: str
    size: int


def begin(
    folder: Path, name: str, options: dict[str, Any], on: Ranks, pipeline: int, **parallel: Any
) -> subprocess.Popen[str]:
    mesh = {
        "device": on.device,
        "backend": on.backend,
        "timeout": 60.0,
        "pipeline": pipeline,
    } | parallel
    config = parse(CONFIG | options | {"name": name, "parallel": mesh})
    (folder / f"{name}.toml").write_text(config.to_toml())
    environment = (
        ENVIRONMENT if on.backend == "gloo" or on.size == 1 else {"PYTHONWARNINGS": "default"}
    )
    return start([sys.executable, "-m", "dynmo", "train", f"{name}.toml"], folder, environment)


def digest(
    folder: Path,
    schedule: str,
    on: Ranks,
    pipeline: int,
    data: int,
    zero: int = 0,
    expert: int = 1,
    **options: Any,
) -> str:
    """Trains, and returns the digest of the weights.

    Layers move at every step and freeze.

    Args:
        folder: Working folder of the run.
        schedule: Name of the schedule.
        on: The device and the backend.
        pipeline: Ranks of a pipeline.
        data: Number of replicas.
        zero: 1 shards the optimizer's state.
        expert: Replicas that share one set of experts.
        **options: Other sections of the configuration.

    Returns:
        The SHA-256 of all weights.
    """
    name = f"{schedule}-{pipeline}x{data}x{expert}"
    process = begin(
        folder,
        name,
        {"pipeline": {"schedule": schedule}} | options,
        on,
        pipeline,
        data=data,
        zero=zero,
        expert=expert,
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
    """The digest of one rank."""
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
    assert digest(tmp_path, "zb-h1", on, on.size, 1, train=train) == digest(
        tmp_path, "1f1b", on, 1, 1, train=train
    )


@pytest.mark.gpu
def test_repeated_mesh_changes_train_the_same(on: Ranks, alone: str, tmp_path: Path) -> None:
    """The run returns to its first shape and uses the old channels again."""
    elastic = {"reshape_at": [[3, on.size // 2, 2], [5, on.size, 1]]}
    assert digest(tmp_path, "zb-h1", on, on.size, 1, elastic=elastic) == alone


@pytest.mark.gpu
@pytest.mark.parametrize("park", [True, False])
def test_ranks_that_leave_and_come_back_train_the_same(
    on: Ranks, alone: str, tmp_path: Path, park: bool
) -> None:
    """The process groups are rebuilt with fewer ranks, and then with all ranks."""
    elastic = {"reshape_at": [[2, on.size // 2, 1], [5, on.size, 1]], "park": park}
    assert digest(tmp_path, "zb-h1", on, on.size, 1, elastic=elastic) == alone


@pytest.mark.gpu
def test_hanging_rank_is_named_and_all_ranks_end(on: Ranks, tmp_path: Path) -> None:
    """The waiting rank names the hanging rank."""
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
