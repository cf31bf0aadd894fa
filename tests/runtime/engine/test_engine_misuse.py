"""Mistakes in a user's own training loop, and threads that it may leave behind."""

from __future__ import annotations

import gc
import math
import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from dynmo.errors import InputError, PartitionError
from dynmo.models.loss import next_token_loss
from dynmo.models.model import from_factories
from dynmo.pipeline.actions import Actions
from dynmo.plan.partition import Partition, uniform
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.comm.process_mesh import arrange
from dynmo.runtime.engine.batch_check import StepBatch
from dynmo.runtime.engine.engine import Engine
from dynmo.runtime.options import EngineOptions
from tests.pool import Pool
from tests.runtime.alone import MICROBATCHES, gpt, pipeline, run_step, tokens
from tests.runtime.jobs import error_of
from tests.runtime.modules import Net

JOBS = "tests.runtime.engine.test_engine_misuse:"


@pytest.mark.parametrize("layers", [[99], [-1], [0, 6]])
def test_unknown_layers_are_refused(layers: list[int]) -> None:
    pipeline = gpt()
    with pytest.raises(PartitionError, match=r"no layer -?\d+"):
        Actions(pipeline).freeze(layers)
    with pytest.raises(PartitionError, match="there is no layer"):
        Actions(pipeline).unfreeze(layers)
    assert pipeline.store.frozen.layers == frozenset()


def test_batches_that_are_not_tensors_are_refused() -> None:
    """The error is one line that names the argument, before any layer runs."""
    pipeline, twin = gpt(), gpt()
    inputs, targets = tokens(0)
    wrong: list[tuple[Any, Any, str]] = [
        ((inputs,), targets, "inputs is a tuple; give one tensor"),
        (inputs, targets.numpy(), "targets is a ndarray; give one tensor"),
        (None, targets, "inputs is None, but rank 0 holds the first stage"),
        (inputs, None, "targets is None, but rank 0 holds the last stage"),
        (torch.tensor(3), targets, "inputs: no microbatches, shape"),
    ]
    for x, y, says in wrong:
        with pytest.raises(InputError, match=says):
            run_step(pipeline, 0, x, y, lr=0.1)
        with pytest.raises(InputError, match=says):
            pipeline.evaluate(StepBatch(x, y), MICROBATCHES)
    rates: dict[str, Any]
    for rates in ({"lr": math.nan}, {"lr": -1.0}, {"lr": 0.1, "max_norm": math.nan}):
        with pytest.raises(InputError, match=r"(lr|max_norm) = (nan|-1.0)"):
            run_step(pipeline, 0, inputs, targets, **rates)
    run_step(pipeline, 0, inputs, targets, lr=0.1)
    run_step(twin, 0, inputs, targets, lr=0.1)
    assert pipeline.digest() == twin.digest()


def test_tied_weight_unused_by_its_owner_trains() -> None:
    """The weight trains through its other use."""

    def unused() -> nn.Module:
        table = nn.Parameter(torch.randn(256, 8))
        return Net(lambda m, ids: m.tokens(ids), table=table, tokens=nn.Embedding(256, 8))

    factories = [unused, partial(nn.Linear, 8, 256, bias=False)]
    tied = [((0, "table"), (1, "weight"))]
    pipe = pipeline(from_factories(list("ab"), factories, 0, next_token_loss, tied=tied))
    before = pipe.store.own[0][0].get_parameter("table").detach().clone()
    for step in range(2):
        run_step(pipe, step, *tokens(step), lr=0.1)
    table = pipe.store.own[0][0].get_parameter("table")
    assert not torch.equal(table, before)
    assert torch.equal(table, pipe.store.own[1][0].get_parameter("weight"))


def threads(world: Meeting, times: int) -> list[int]:
    """Threads after each pipeline with replicas was made, evaluated and dropped."""
    model, mesh = gpt().model, arrange(world, world.size)
    out: list[int] = []
    for count in range(1, times + 1):
        pipeline = Engine(mesh, model, Partition((6,)), EngineOptions("1f1b", MICROBATCHES))
        evaluate(pipeline, 1 + count % 4)
        del pipeline
        gc.collect()
        out.append(threading.active_count())
    return out


def evaluate(pipeline: Engine, end: int) -> list[int]:
    """Threads after evaluations of more and more microbatches."""
    x, y = (each[0] for each in tokens(0))
    out: list[int] = []
    for count in range(1, end):
        pipeline.evaluate(StepBatch(x.repeat(count, 1, 1), y.repeat(count, 1, 1)), count)
        out.append(threading.active_count())
    return out


def builds_another(world: Meeting, other: int) -> list[str]:
    """One rank makes layer 2 of four wider than the others. Returns what is said."""
    width = 9 if world.rank == other else 8
    sizes = [(8, 8), (8, 8), (8, width), (width, 8)]
    factories = [partial(nn.Linear, *size) for size in sizes]
    model = from_factories(list("abcd"), factories, 0, next_token_loss)
    steps = EngineOptions("zb-h1", microbatches=2)
    return error_of(lambda: Engine(world, model, uniform(4, world.size), steps))


def test_ranks_with_different_models_are_refused(pool: Pool) -> None:
    """All ranks raise the error before they exchange other messages."""
    told = pool.run(JOBS + "builds_another", 3, other=1)
    for rank, (_, text) in enumerate(told):
        mine = f"on rank {rank}: float32 [{9 if rank == 1 else 8}, 8], trains"
        what = "layer 2 (c), parameter weight"
        assert text.startswith(f"{what} is not the same on rank 0 and rank 1 ({mine})")


def test_threads_end_with_their_pipeline(pool: Pool) -> None:
    for counts in pool.run(JOBS + "threads", 2, times=4):
        assert max(counts[2:]) <= max(counts[:2])


def evaluated(world: Meeting) -> list[int]:
    """Threads after evaluations of more and more microbatches, on a pipeline of two."""
    pipeline = Engine(world, gpt().model, Partition((3, 3)), EngineOptions("1f1b", MICROBATCHES))
    return evaluate(pipeline, 9)


def test_threads_do_not_grow_with_evaluations(pool: Pool) -> None:
    for counts in pool.run(JOBS + "evaluated", 2):
        assert counts[-1] == counts[2]
