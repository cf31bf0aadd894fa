"""SM slices, as far as they can be tested without a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dynmo.config import parse
from dynmo.errors import ConfigError
from dynmo.pipeline.actions import Actions
from dynmo.plan.partition import Partition
from dynmo.runtime.comm.rendezvous import Rendezvous
from dynmo.runtime.engine.engine import Engine
from dynmo.runtime.engine.stage_streams import cut, sizes
from dynmo.runtime.options import EngineOptions
from dynmo.train.setup import check_world, device_for, model_of
from tests.equality import RANDOM_MOVES
from tests.pool import Pool
from tests.runtime.alone import GPT, MICROBATCHES, alone

CONFIG: dict[str, Any] = {
    "model": GPT,
    "train": {"steps": 4, "global_batch": 8, "micro_batch": 2},
    "parallel": {"pipeline": 3, "slices": True, "device": "cpu"},
    "balance": {"balancer": RANDOM_MOVES, "every": 1},
    "checkpoint": {"every": 2},
    "trace": {"steps": 4},
}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((132, 4, 8, 8), [32, 24, 16, 8]),  # compute capability 9.0: multiples of 8
        ((132, 2, 8, 8), [64, 56, 48, 40, 32, 24, 16, 8]),
        ((108, 3, 4, 2), list(range(36, 3, -2))),  # 8.0: at least 4, multiples of 2
        ((20, 3, 8, 8), []),
        ((7, 2, 0, 0), [3, 2, 1]),
    ],
)
def test_slice_sizes_to_try(given: tuple[int, int, int, int], expected: list[int]) -> None:
    assert list(sizes(*given)) == expected


def test_missing_cuda_core_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda", None)
    with pytest.raises(ConfigError, match="install it with pip install cuda-core"):
        cut(0, 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
def test_slices_without_a_gpu_are_refused() -> None:
    config = parse(CONFIG | {"parallel": {"pipeline": 3, "slices": True}})
    with pytest.raises(ConfigError, match=r"parallel\.slices"):
        device_for(config, 0)
    assert device_for(parse(CONFIG), 0) == torch.device("cpu")


def test_pipeline_on_slices_is_one_process() -> None:
    config = parse(CONFIG)
    assert config.ranks == 1
    check_world(config, Rendezvous(0, 1, 0, folder="."))
    with pytest.raises(ConfigError, match=r"3 ranks.*parallel\.replicas"):
        check_world(config, Rendezvous(0, 3, 0, folder="."))


def test_slices_cannot_be_reshaped() -> None:
    steps = EngineOptions("zb-h1", microbatches=MICROBATCHES, slices=3)
    pipeline = Engine(alone(), model_of(parse(CONFIG)), Partition((2, 2, 2)), steps)
    layout = pipeline.store.layout
    assert (layout.shape, layout.stage_ranks) == ((3, 1), (0, 1, 2))
    assert pipeline.store.own_stages == (0, 1, 2)
    with pytest.raises(AssertionError, match="cannot be reshaped"):
        Actions(pipeline).reshape(pipeline=1, data=3)


def test_moves_between_slices_send_no_bytes_and_a_run_resumes_on_ranks(
    pool: Pool, tmp_path: Path
) -> None:
    (whole,) = pool.run("train_in", 1, config=CONFIG, folder=str(tmp_path))
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    moves = [e for e in events if e["event"] == "rebalance"]
    assert moves
    assert {e["moved_bytes"] for e in moves} == {0}
    assert all(0 < e["idle_ratio"] < 1 for e in events if e["event"] == "step")
    assert json.loads((tmp_path / "costs.json").read_text())["ranks"] == 3
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    ran = {(e["tid"], e["args"]["stage"]) for e in trace if e["ph"] == "X"}
    assert ran == {(0, 0), (1, 1), (2, 2)}
    folder = str(tmp_path / "resumed")
    Path(folder).mkdir()
    pool.run("train_in", 1, config=CONFIG, folder=folder, stop_after=1)
    other = CONFIG | {"parallel": {"pipeline": 2}}
    resumed = pool.run("train_in", 2, config=other, folder=folder, resume=True)[0]
    assert resumed["weights_digest"] == whole["weights_digest"]
