"""A stage waits for every result that it takes from another stage."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dynmo.config import parse
from dynmo.errors import ConfigError
from dynmo.pipeline.actions import Actions
from dynmo.plan.partition import Partition
from dynmo.runtime.comm.channels import Transport
from dynmo.runtime.comm.clock import HostClock
from dynmo.runtime.comm.rendezvous import Rendezvous
from dynmo.runtime.engine.batch_check import StepBatch
from dynmo.runtime.engine.engine import Engine
from dynmo.runtime.engine.executor import Executor
from dynmo.runtime.engine.stage_streams import Key, StageStreams, cut, sizes
from dynmo.runtime.layer.joint_graph import Tensors
from dynmo.runtime.layer.stage import Stage
from dynmo.runtime.options import EngineOptions
from dynmo.schedule.catalogue import make
from dynmo.schedule.lowering import Direction, fold, lower
from dynmo.train.setup import check_world, device_for, model_of
from tests.equality import RANDOM_MOVES
from tests.pool import Pool
from tests.runtime.alone import GPT, alone
from tests.runtime.modules import assert_same, draw, gradients_of, layer_of

MICROBATCHES = 4


class Noted(StageStreams):
    """Notes (what, stage whose slice it is, key)."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int | None, Key | None]] = []
        self.sizes: dict[Key, int] = {}
        self._stage: int | None = None

    def fork(self) -> None:
        self.asked.append(("fork", self._stage, None))

    def join(self) -> None:
        self.asked.append(("join", self._stage, None))

    @contextmanager
    def of(self, stage: int) -> Iterator[None]:
        assert self._stage is None
        self._stage = stage
        yield
        self._stage = None

    def need(self, key: Key, tensors: Tensors) -> None:
        self.asked.append(("need", self._stage, key))
        self.sizes[key] = len(tensors)

    def produced(self, key: Key) -> None:
        self.asked.append(("produced", self._stage, key))


def executor(streams: StageStreams, first: int) -> tuple[Executor, nn.Module]:
    torch.manual_seed(0)
    modules: list[nn.Module] = [nn.Linear(4, 4).requires_grad_(i >= first) for i in range(3)]
    losses = (None, None, nn.functional.mse_loss)
    stages = {
        i: Stage([layer_of(m, i)], first, loss, 1 / MICROBATCHES)
        for i, (m, loss) in enumerate(zip(modules, losses, strict=True))
    }
    programs = lower(fold(make("zb-h1", 3, MICROBATCHES, first_trainable=first)))
    ends = Transport(alone(), programs)
    return Executor(programs[0], stages, ends, HostClock(), streams), nn.ModuleList(modules)


@pytest.mark.parametrize("first", [0, 1])
def test_stage_waits_for_the_result_of_another_stage(first: int) -> None:
    streams = Noted()
    runner, modules = executor(streams, first)
    given = draw(1, MICROBATCHES, 2, 4)
    batch = StepBatch(given, given)
    losses = runner.run(0, batch).losses
    assert [what for what, _, _ in streams.asked if what in ("fork", "join")] == ["fork", "join"]
    assert (streams.asked[0][0], streams.asked[-1][0]) == ("fork", "join")
    ready = dict[Key, int | None]()
    waited = set[Key]()
    for what, stage, key in streams.asked[1:-1]:
        assert key is not None
        direction, needs, _ = key
        below = 1 if direction is Direction.ACTIVATION else -1
        if what == "produced":
            assert stage == needs - below
            ready[key] = stage
        else:
            assert stage == needs
            # Only the batch, and the loss's own gradient, come from no other slice.
            from_outside = needs == (0 if direction is Direction.ACTIVATION else 2)
            assert (key in ready) != from_outside
            no_tensor = needs == 2 and direction is Direction.GRADIENT
            assert streams.sizes[key] == (0 if no_tensor else 1)
            waited.add(key)
    assert ready.keys() <= waited
    assert len(ready) == MICROBATCHES * (2 + 2 - first)

    plain, others = executor(StageStreams(), first)
    assert [x.tolist() for x in plain.run(0, batch).losses] == [x.tolist() for x in losses]
    assert_same(gradients_of(modules), gradients_of(others))


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
    steps = EngineOptions("zb-h1", microbatches=3, slices=3)
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
    kinds = {f"{what}{kind}" for what in ("", "planned ") for kind in ("F", "B", "W", "BW")}
    passes = [e for e in trace if e["ph"] == "X" and e["cat"] in kinds]
    ran = {(e["pid"], e["tid"] % 10_000, e["args"]["stage"]) for e in passes}
    assert ran == {(process, rank, rank) for process in (2, 3) for rank in range(3)}
    folder = str(tmp_path / "resumed")
    Path(folder).mkdir()
    pool.run("train_in", 1, config=CONFIG, folder=folder, stop_after=1)
    other = CONFIG | {"parallel": {"pipeline": 2}}
    resumed = pool.run("train_in", 2, config=other, folder=folder, resume=True)[0]
    assert resumed["weights_digest"] == whole["weights_digest"]
