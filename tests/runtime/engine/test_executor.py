"""Any program gives the bits of one process, also with several stages per rank."""

from __future__ import annotations

from functools import cache
from itertools import product
from random import Random
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from dynmo.kernels.seeds import mix
from dynmo.runtime.comm.channels import Transport
from dynmo.runtime.comm.clock import HostClock
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.engine.batch_check import StepBatch
from dynmo.runtime.engine.executor import Executor
from dynmo.runtime.engine.stage_streams import StageStreams
from dynmo.runtime.layer.accumulation import AccumulationGroups
from dynmo.runtime.layer.layer import Layer
from dynmo.runtime.layer.stage import Stage
from dynmo.schedule.lowering import lower
from dynmo.schedule.op import Schedule
from tests.combinations import mostly_matrix
from tests.pool import Pool
from tests.runtime.modules import bits_of
from tests.schedule.samples import from_text, wander


def _small_layer(index: int, count: int) -> nn.Module:
    torch.manual_seed(mix(9, index))
    if index == 0:
        return nn.Embedding(11, 6)
    if index == count - 1:
        return nn.Linear(6, 11)
    inner = [nn.Dropout(0.2), nn.Tanh(), nn.LayerNorm(6)]
    return nn.Sequential(nn.Linear(6, 6), *inner, nn.Linear(6, 6))


def _stages(order: Schedule, rank: int, layers: int, microbatches: int) -> dict[int, Stage]:
    """Makes the stages of a rank."""
    each = layers // order.stages
    first = order.first_trainable * each

    def layer(index: int) -> Layer:
        module = _small_layer(index, layers).requires_grad_(index >= first)
        groups = AccumulationGroups(list(module.parameters()), microbatches, 1)
        return Layer(index, module, HostClock(), 4, groups=groups)

    return {
        s: Stage(
            [layer(i) for i in range(s * each, (s + 1) * each)],
            first,
            functional.cross_entropy if s == order.stages - 1 else None,
            1 / microbatches,
        )
        for s in order.stages_of(rank)
    }


def execute(
    world: Meeting,
    schedule: Any,
    layers: int,
    microbatches: int,
    frozen: int = 0,
) -> dict[str, Any]:
    """Two steps of a text or of a random schedule [placement, seed], with equal stages."""
    order = (
        from_text(schedule)
        if isinstance(schedule, str)
        else wander(schedule[0], microbatches, frozen, Random(schedule[1]))
    )
    programs = lower(order)
    stages = _stages(order, world.rank, layers, microbatches)
    ends = Transport(world, programs)
    executor = Executor(programs[world.rank], stages, ends, HostClock(), StageStreams())
    random = torch.Generator().manual_seed(1)
    losses: list[float] = []
    own = [layer for stage in stages.values() for layer in stage.layers]
    gradients: dict[str, list[str | None]] = {}
    for step in range(2):
        inputs = torch.randint(11, (microbatches, 4), generator=random)
        step_output = executor.run(step, StepBatch(inputs, inputs.flip(0)))
        # Else a loss keeps its graph, and what that has not saved.
        assert not any(loss.requires_grad for loss in step_output.losses)
        if step_output.losses:
            losses.append(float(torch.stack(step_output.losses).double().mean()))
        for layer in own:
            for name, p in layer.module.named_parameters():
                found = None if p.grad is None else bits_of(p.grad)
                gradients.setdefault(f"{layer.index}.{name}", []).append(found)
                p.grad = None
    executor.close()
    return {
        "losses": losses if order.stage_ranks[-1] == world.rank else None,
        "gradients": gradients,
        "left": sum(len(layer._graphs) + len(layer._weight_work) for layer in own),
    }


EXECUTE = "tests.runtime.engine.test_executor:execute"
LAYERS = 8


@cache
def reference(pool: Pool, microbatches: int, frozen: int) -> dict[str, Any]:
    """One rank runs one F and one BW at a time."""
    forward = [f"{s}F" for s in range(LAYERS)]
    backward = [f"{s}BW" for s in reversed(range(frozen, LAYERS))]
    rows = " ".join(f"{op}{j}" for j in range(microbatches) for op in forward + backward)
    text = (
        f"# one  ranks=1 microbatches={microbatches} placement={','.join('0' * LAYERS)} "
        f"first_trainable={frozen}\n0 | {rows}\n"
    )
    return merged(pool.run(EXECUTE, 1, schedule=text, layers=LAYERS, microbatches=microbatches))


def merged(results: list[dict[str, Any]]) -> dict[str, Any]:
    assert all(r["left"] == 0 for r in results), "a microbatch left something behind"
    gradients = {name: value for r in results for name, value in r["gradients"].items()}
    (losses,) = [r["losses"] for r in results if r["losses"] is not None]
    return {"losses": losses, "gradients": gradients}


def test_reference_has_gradients_of_trainable_layers_only(pool: Pool) -> None:
    for frozen in (0, 4):
        one = reference(pool, 5, frozen)
        for name, gradients in one["gradients"].items():
            for gradient in gradients:
                assert (gradient is None) == (int(name.split(".")[0]) < frozen)
        assert len(set(one["losses"])) == 2


PLACEMENTS = ("0110", "0101", "0011", "01", "0123", "0120")


@pytest.mark.parametrize(
    ("placement", "frozen", "seed"),
    mostly_matrix(
        product(PLACEMENTS, (0, 1, 3), (0, 1)),
        everyday=[(each, (0, 1, 3)[n % 3], n % 2) for n, each in enumerate(PLACEMENTS)],
    ),
)
def test_any_order_of_ops_gives_the_bits_of_one_rank(
    pool: Pool, placement: str, frozen: int, seed: int
) -> None:
    """The schedules are random. Every stage is fused or split."""
    ranks, stages = int(max(placement)) + 1, len(placement)
    frozen = min(frozen, stages - 1)
    schedule = [[int(rank) for rank in placement], seed]
    sizes = {"layers": LAYERS, "microbatches": 5, "frozen": frozen}
    results = pool.run(EXECUTE, ranks, schedule=schedule, **sizes)
    assert merged(results) == reference(pool, 5, frozen * LAYERS // stages)
