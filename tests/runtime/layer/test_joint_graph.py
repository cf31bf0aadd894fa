"""Graphs of several layers have the bits of graphs of one."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from dynmo.runtime.comm.clock import HostClock
from dynmo.runtime.layer.accumulation import AccumulationGroups
from dynmo.runtime.layer.layer import Layer
from dynmo.runtime.layer.stage import Stage
from dynmo.schedule.op import Kind
from tests.fuzz.layers import LAYERS, WIDTH
from tests.runtime.modules import Net, bits_of

STEPS, MICROBATCHES = 3, 4


def stage_of(modules: list[nn.Module], is_timed: bool) -> Stage:
    """A stage whose graphs are cut at each layer, or wherever they need not be one."""
    layers = [Layer(i, module, HostClock(), 0, others=dict) for i, module in enumerate(modules)]
    for layer in layers:
        layer.is_timed = is_timed
    return Stage(layers, 0, nn.functional.mse_loss)


def order_of(draw: random.Random) -> list[tuple[Kind, int]]:
    """Draws an order of B, W and BW that zero bubble could have."""
    ops, waiting = list[tuple[Kind, int]](), list[int]()
    for j in range(MICROBATCHES):
        whole = draw.random() < 0.3
        # W's run in the order of their microbatches.
        while waiting and (whole or draw.random() < 0.5):
            ops.append((Kind.W, waiting.pop(0)))
        ops.append((Kind.BW if whole else Kind.B, j))
        waiting += [] if whole else [j]
    return [*ops, *((Kind.W, j) for j in waiting)]


def train(stage: Stage, seed: int, forwards: int) -> tuple[list[str], int]:
    """Runs some steps. Returns the bits of losses and gradients, and the graphs of a microbatch.

    Args:
        forwards: F's that run ahead of the first B.
    """
    draw, bits, graphs = random.Random(seed), list[str](), 0
    data = torch.Generator().manual_seed(seed)
    for step in range(STEPS):
        batch = torch.randn(2, MICROBATCHES, 3, 5, WIDTH, generator=data)
        stage.begin()
        ahead, ops = min(MICROBATCHES, forwards), order_of(draw)
        pending = list(range(MICROBATCHES))
        for at, (kind, j) in enumerate(ops):
            while pending and (pending[0] <= j or (at == 0 and pending[0] < ahead)):
                f = pending.pop(0)
                (loss,) = stage.forward(f, (batch[0, f],), step, batch[1, f], training=True)
                bits.append(bits_of(loss))
                graphs = sum(f in layer._graphs for layer in stage.layers)
            if kind is Kind.W:
                stage.backward_weight(j)
            else:
                stage.backward_input(j, None, deferred=kind is Kind.B)
        for layer in stage.layers:
            for name, p in layer.module.named_parameters():
                bits.append(f"{name} {None if p.grad is None else bits_of(p.grad)}")
                p.grad = None
    return bits, graphs


@pytest.mark.parametrize("seed", range(200))
def test_bits_do_not_depend_on_cuts(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    kinds = draw.choices(sorted(LAYERS), k=draw.randint(2, 5))
    modules = [LAYERS[kind].make() for kind in kinds]
    frozen = draw.choice([None, None, *modules])
    if frozen is not None:
        frozen.requires_grad_(False)
    count = draw.choice([1, 1, 2])
    forwards, found = draw.randint(1, MICROBATCHES), list[tuple[list[str], int]]()
    for is_timed in (True, False):
        stage = stage_of(copy.deepcopy(modules), is_timed)
        for layer in stage.layers:
            if count > 1:
                layer._groups = AccumulationGroups(layer.parameters, MICROBATCHES, count)
        found.append(train(stage, seed, forwards))
    assert found[0][0] == found[1][0], kinds
    assert found[0][1] == len(modules)


def block() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())


@pytest.mark.parametrize(
    ("cuts", "graphs"),
    [
        pytest.param(lambda layers: None, 1, id="nothing"),
        pytest.param(lambda layers: vars(layers[2]).update(recompute=True), 3, id="recompute"),
        pytest.param(lambda layers: setattr(layers[2], "is_timed", True), 3, id="a timed layer"),
    ],
)
def test_graph_is_cut_only_where_it_must_be(cuts: Any, graphs: int) -> None:
    torch.manual_seed(0)
    modules = [block() for _ in range(5)]
    stage = stage_of(modules, is_timed=False)
    cuts(stage.layers)
    cut, whole = train(stage, 0, 1), train(stage_of(copy.deepcopy(modules), True), 0, 1)
    assert (cut[0], cut[1], whole[1]) == (whole[0], graphs, 5)


class Sometimes(nn.Module):
    """Leaves its input out in some microbatches."""

    def __init__(self, skips: set[int]) -> None:
        super().__init__()
        self.skips, self.line = skips, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        leaves = int(x.detach()[0, 0, 0].mul(1e4)) % 4 in self.skips
        return self.line(torch.ones_like(x) if leaves else x)


@pytest.mark.parametrize("seed", range(12))
def test_gradient_that_is_missing_counts_the_same(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    skips = {place for place in range(4) if draw.random() < 0.5}
    modules = [block(), block(), Sometimes(skips), block()]
    found = [
        train(stage_of(copy.deepcopy(modules), is_timed), seed, 2) for is_timed in (True, False)
    ]
    assert found[0][0] == found[1][0]


def test_error_names_the_layers_of_its_graph() -> None:
    def broken(_: Tensor) -> None:
        raise ArithmeticError("no gradient today")

    def hooked(_: nn.Module, x: Tensor) -> Tensor:
        y = x * 2
        if calls:
            y.register_hook(broken)
        return y

    calls = list[int]()
    stage = stage_of([block(), Net(hooked), block()], is_timed=False)
    train(stage, 0, 1)
    calls.append(1)
    stage.begin()
    x = torch.randn(3, 5, WIDTH)
    stage.forward(0, (x,), 0, x, training=True)
    with pytest.raises(ArithmeticError) as wrong:
        stage.backward_input(0, None, deferred=True)
    assert wrong.value.__notes__ == ["in B of layers 0 to 2"]
    stage.clear()


def test_weight_that_is_used_by_itself_later_has_its_whole_gradient() -> None:
    """Its gradient is all B's from then on."""

    def late(module: Any, x: Tensor) -> Tensor:
        y = module.line(x)
        return y * module.line.weight.sum() if use[0] else y

    use = [0]
    torch.manual_seed(0)
    modules = [block(), Net(late, line=nn.Linear(WIDTH, WIDTH)), block()]
    plain = nn.Sequential(*copy.deepcopy(modules))
    stage = stage_of(modules, is_timed=False)
    for step, uses in enumerate(([0, 0, 0, 0], [0, 0, 0, 1], [1, 0, 1, 0])):
        stage.begin()
        for j, use[0] in enumerate(uses):
            x = torch.randn(3, 5, WIDTH)
            stage.forward(j, (x,), step, x, training=True)
            functional.mse_loss(plain(x), x).backward()
        for j in range(MICROBATCHES):
            stage.backward_input(j, None, deferred=True)
        for j in range(MICROBATCHES):
            stage.backward_weight(j)
        for module, other in zip(modules, plain, strict=True):
            for ours, theirs in zip(module.parameters(), other.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad)
                ours.grad = theirs.grad = None
