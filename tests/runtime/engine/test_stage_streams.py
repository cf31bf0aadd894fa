"""A stage waits for every result that it takes from another stage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from dynmo.runtime.comm.channels import Transport
from dynmo.runtime.comm.clock import HostClock
from dynmo.runtime.engine.batch_check import StepBatch
from dynmo.runtime.engine.executor import Executor
from dynmo.runtime.engine.stage_streams import Key, StageStreams
from dynmo.runtime.layer.span import Tensors
from dynmo.runtime.layer.stage import Stage
from dynmo.schedule.catalogue import make
from dynmo.schedule.lowering import Direction, fold, lower
from tests.runtime.alone import alone
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
