"""A parameter without a gradient is not stepped, as in torch.

It is neither decayed nor moved by its momentum, and its state does not count the step.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from dynmo.config import parse
from dynmo.data.batches import Batches
from dynmo.data.corpus import open_corpus
from dynmo.kernels.seeds import Purpose, mix
from dynmo.models.loss import next_token_loss
from dynmo.models.model import from_factories
from dynmo.plan.partition import Partition
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.engine.engine import Engine
from dynmo.runtime.options import EngineOptions
from dynmo.train.setup import model_of
from tests.combinations import mostly_matrix
from tests.equality import decay_groups
from tests.jobs import SOURCE
from tests.pool import Pool
from tests.runtime.alone import run_step
from tests.test_own_models import config

Optimizer = Literal["adamw", "sgd"]
Weights = dict[int, list[float]]
MODEL, STEPS = "tests.models.without_gradient:layers", 8
# AdamW divides a gradient by its size. It would turn the last bits of a gradient near 0, which
# differ between kernels, into whole steps.
EPS = 1e-4


def run_config(optimizer: Optimizer, ranks: int, **changes: Any) -> dict[str, Any]:
    train = {"steps": STEPS, "max_grad_norm": 0.0, "weight_decay": 0.5, "optimizer": optimizer}
    train |= {"eps": EPS, "betas": [0.9, 0.95]} if optimizer == "adamw" else {"momentum": 0.9}
    return config(MODEL, ranks, **{**changes, "train": train | changes.get("train", {})})


def trained(pool: Pool, optimizer: Optimizer, ranks: int = 1, **changes: Any) -> Weights:
    """Returns the weights of each layer after a run."""
    settings = run_config(optimizer, ranks, **changes)
    ended = pool.run(
        "train_and_weights", ranks * settings["parallel"].get("replicas", 1), config=settings
    )
    return {int(index): weights for rank in ended for index, weights in rank["weights"].items()}


@cache
def plain(optimizer: Optimizer, groups: int = 1) -> tuple[Weights, list[list[bool]]]:
    """Weights of each layer by torch alone, and for each step which parameters had a gradient."""
    loaded = parse(run_config(optimizer, 1) | {"data": {"source": SOURCE}})
    model = model_of(loaded)
    layers = nn.Sequential(*[_Spread(layer) for layer in model.build(range(model.layers))])
    parameters = list(layers.parameters())
    settings = decay_groups(layers, 0.5)
    stepper = (
        torch.optim.AdamW(settings, lr=0.05, betas=(0.9, 0.95), eps=EPS, fused=True)
        if optimizer == "adamw"
        else torch.optim.SGD(settings, lr=0.05, momentum=0.9, fused=True)
    )
    batches = Batches(open_corpus(SOURCE), 8, 8, 2, loaded.seed)
    there: list[list[bool]] = []
    for step in range(STEPS):
        sums: list[list[Tensor | None]] = []
        inputs, targets = batches.train(step)
        for x, y in zip(inputs.chunk(groups), targets.chunk(groups), strict=True):
            stepper.zero_grad()
            for each, target in zip(x, y, strict=True):
                model.loss(layers(each), target).backward(torch.tensor(1 / len(inputs)))
            sums.append([p.grad for p in parameters])
        for parameter, parts in zip(parameters, zip(*sums, strict=True), strict=True):
            partial_sums = [part for part in parts if part is not None]
            parameter.grad = torch.stack(partial_sums).sum(0) if partial_sums else None
        there.append([p.grad is not None for p in parameters])
        stepper.step()
    return {
        index: [x for p in layer.parameters() for x in p.flatten().tolist()]
        for index, layer in enumerate(layers)
    }, there


class _Spread(nn.Module):
    """Gives a tuple to a layer as its arguments."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor | tuple[Tensor, ...]) -> Any:
        return self.layer(*x) if isinstance(x, tuple) else self.layer(x)


def test_the_model_has_each_kind_of_parameter() -> None:
    _, there = plain("adamw")
    by_parameter = list(zip(*there, strict=True))
    assert not any(map(any, by_parameter[:3])), "integers are handed on"
    assert not any(by_parameter[3]), "unused"
    assert len(set(by_parameter[4])) == 2, "in some steps"
    assert not any(map(any, by_parameter[7:9])), "an output that the next layer ignores"
    assert all(map(all, by_parameter[9:]))


@pytest.mark.parametrize("optimizer", mostly_matrix(["adamw", "sgd"], everyday=["adamw"]))
def test_parameters_without_a_gradient_are_skipped_as_in_torch(
    pool: Pool, optimizer: Optimizer
) -> None:
    """On one rank, and on three whose layers move at each step."""
    weights = trained(pool, optimizer)
    assert_close(weights, plain(optimizer)[0])
    assert trained(pool, optimizer, 3, train={"recompute": "all"}) == weights


@pytest.mark.parametrize("optimizer", mostly_matrix(["adamw", "sgd"], everyday=["sgd"]))
def test_replicas_skip_what_no_replica_has(pool: Pool, optimizer: Optimizer) -> None:
    two_groups = {"reduction_slots": 2}
    weights = trained(pool, optimizer, train=two_groups)
    assert_close(weights, plain(optimizer, groups=2)[0])
    for zero in (0, 1):
        parallel = {"replicas": 2, "zero": zero}
        assert trained(pool, optimizer, 2, train=two_groups, parallel=parallel) == weights


def test_steps_that_are_taken_back_skip_the_same(pool: Pool) -> None:
    """The gradients are clipped, so ranks take their first attempt back."""
    clipped = {"max_grad_norm": 0.05}
    expected = trained(pool, "adamw", train=clipped)
    ways = ({"post_validation": True, "rollback": way} for way in ("exact", "in-place"))
    exact, near = (trained(pool, "adamw", 2, train=clipped, pipeline=way) for way in ways)
    assert exact == expected
    assert_close(near, expected)
    assert near[0] == exact[0] == plain("adamw")[0][0], "nothing trains below integers"


class Head(nn.Linear):
    """Trains its bias alone."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.linear(input.detach(), self.weight.detach(), self.bias)


def tied(world: Meeting) -> list[float]:
    """Returns the weight of embedding and head after two steps, on the embedding's rank."""
    factories = [partial(nn.Embedding, 16, 4), partial(Head, 4, 16)]
    pairs = [((0, "weight"), (1, "weight"))]
    model = from_factories(["tokens", "head"], factories, 0, next_token_loss, tied=pairs)
    partition = Partition((2,) if world.size == 1 else (1, 1))
    engine = Engine(world, model, partition, EngineOptions("1f1b", 2))
    ids = torch.arange(16).view(2, 2, 4)
    for step in range(2):
        run_step(engine, step, ids, ids, lr=0.1)
    held = [p for p in engine.store.modules[0].parameters() if not p.is_meta]
    return [x for p in held for x in p.flatten().tolist()]


def test_tied_weight_without_a_gradient_does_not_decay(pool: Pool) -> None:
    torch.manual_seed(mix(0, Purpose.INITIAL, 0))
    start = nn.Embedding(16, 4).weight.flatten().tolist()
    for ranks in (1, 2):
        assert pool.run(f"{__name__}:tied", ranks)[0] == start


def assert_close(actual: Weights, expected: Weights) -> None:
    """A decay alone would move weights by a hundredth.

    dynmo adds the gradients of a linear in other kernels than autograd.
    """
    assert actual.keys() == expected.keys()
    for index, weights in expected.items():
        assert actual[index] == pytest.approx(weights, rel=1e-4, abs=1e-5)
