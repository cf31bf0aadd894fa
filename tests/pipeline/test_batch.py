"""Dictionaries, lists of microbatches, and a loss that counts targets."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynmo
from dynmo.errors import InputError
from dynmo.pipeline.options import grouped
from tests.pipeline.named_batches import Embed, cut, make_batch, make_layers, plain_losses
from tests.pool import Pool

JOBS = "tests.pipeline.named_batches:"


@pytest.fixture(scope="module")
def alone(pool: Pool) -> dict[str, Any]:
    return pool.run(JOBS + "train", 1)[0]


def test_losses_and_weights_are_those_of_plain_torch(alone: dict[str, Any]) -> None:
    layers = nn.ModuleList(make_layers())
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1, momentum=0.9)
    losses = plain_losses(layers, optimizer, [cut(make_batch(step), 4) for step in range(4)])
    assert alone["losses"] == pytest.approx(losses, rel=1e-6)
    assert alone["counted"] == 33.0
    assert alone["sums"]["tokens"] == 33.0
    assert 0 <= alone["sums"]["right"] <= 33


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {"schedule": "zb-auto"}),
        (2, {"as_list": True, "post_validation": True}),
        (3, {"schedule": "zb-v", "as_list": True}),
        (4, {"replicas": 2, "moves": True}),
    ],
)
def test_any_ranks_have_the_bits_of_one(
    pool: Pool, alone: dict[str, Any], ranks: int, options: dict[str, Any]
) -> None:
    for told in pool.run(JOBS + "train", ranks, **options):
        assert told["losses"] == alone["losses"]
        assert told["weights"] == alone["weights"]
        assert told["sums"] == alone["sums"]
        assert told["evaluated"] == pytest.approx(alone["evaluated"], rel=1e-12)


def without(name: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda batch: {key: value for key, value in batch.items() if key != name}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (without("attention_mask"), r"lacks attention_mask; its inputs are input_ids, attention"),
        (lambda batch: batch | {"ids": batch["labels"]}, "has ids, which the model lacks"),
        (lambda batch: batch | {"labels": [1]}, "labels of the batch is a list; give a tensor"),
        (
            lambda batch: batch | {"labels": batch["labels"][:9]},
            "different numbers of rows: 12, 12",
        ),
        (lambda batch: {k: v[:10] for k, v in batch.items()}, "multiple of 4 microbatches"),
        (lambda batch: {k: v[:0] for k, v in batch.items()}, "a positive multiple of 4 micro"),
        (lambda batch: batch | {"labels": batch["labels"].to_sparse()}, "torch.sparse_coo; give"),
        (
            lambda batch: torch.nested.nested_tensor([batch["labels"]], layout=torch.jagged),
            "inputs is nested; pad the rows",
        ),
        (lambda batch: [batch["input_ids"][:k] for k in (3, 3, 3, 0)], "microbatch 3 has no rows"),
        (lambda batch: [batch["input_ids"], batch["labels"]], r"DataLoader, call step\(\*batch\)"),
        (
            lambda batch: [batch["input_ids"]] * 4,
            r"targets is None, .* step\(\*batch\) for the pair",
        ),
        (lambda batch: [batch] * 3, "3 microbatches, where 4 are expected"),
        (lambda batch: [batch, 1, batch, batch], "list of dict, int"),
        (lambda batch: [batch] * 3 + [without("labels")(batch)], "have targets that others lack"),
        (lambda batch: (batch["input_ids"], batch["labels"]), "is a tuple; give a dictionary"),
        (without("labels"), "targets is None, but .* or in a dictionary as labels"),
    ],
)
def test_wrong_batches_are_refused_before_the_step(
    world: dynmo.World, change: Callable[[dict[str, Tensor]], Any], told: str
) -> None:
    pipeline = dynmo.Pipeline(dynmo.Sequential(make_layers()), world, microbatches=4)
    before = pipeline.digest()
    with pytest.raises(InputError, match=told):
        pipeline.step(change(make_batch(0)))
    assert pipeline.digest() == before
    assert pipeline.steps == 0
    pipeline.step(make_batch(0))


def test_names_are_given_or_those_of_the_forward(world: dynmo.World) -> None:
    class Anything(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = Embed()

        def forward(self, *given: Tensor) -> tuple[Tensor, Tensor]:
            return self.embed(*given)

    layers = [Anything(), *make_layers()[1:]]
    batch = {"ids": make_batch(0)["input_ids"], "keep": make_batch(0)["attention_mask"]}
    targets = make_batch(0)["labels"]
    with pytest.raises(InputError, match="does not name its inputs"):
        dynmo.Pipeline(dynmo.Sequential(layers), world, microbatches=4).step(batch, targets)
    named = dynmo.Sequential(layers, inputs=("ids", "keep"))
    dynmo.Pipeline(named, world, microbatches=4).step(batch, targets)


def test_several_targets_reach_the_loss_by_name(world: dynmo.World) -> None:
    def loss(output: Tensor, targets: dict[str, Tensor]) -> Tensor:
        return ((output - targets["y"]) ** 2 * targets["weight"]).sum() / targets["weight"].sum()

    def count(targets: dict[str, Tensor]) -> Tensor:
        return targets["weight"].sum()

    torch.manual_seed(0)
    layers = [nn.Linear(2, 4), nn.Linear(4, 1)]
    rows = torch.randn(6, 2)
    batch = {
        "input": rows,
        "y": torch.randn(6, 1),
        "weight": torch.tensor([[1.0]] * 2 + [[0.5]] * 4),
    }
    whole = float(loss(nn.Sequential(*layers)(rows), batch).detach())
    model = dynmo.Sequential(layers, loss, targets=("y", "weight"), count=count)
    assert dynmo.Pipeline(model, world, microbatches=3).evaluate(batch) == pytest.approx(whole)


def test_a_target_may_be_a_number(world: dynmo.World) -> None:
    """Each microbatch is one row, whose target has no dimensions."""
    torch.manual_seed(0)
    layers = [nn.Linear(2, 4), nn.Linear(4, 1)]
    batch = [{"input": torch.randn(2), "labels": torch.randn(())} for _ in range(3)]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output.squeeze() - target).square()

    pipeline = dynmo.Pipeline(dynmo.Sequential(layers, loss), world, microbatches=3)
    parts = [loss(nn.Sequential(*layers)(each["input"]), each["labels"]) for each in batch]
    expected = float(torch.stack(parts).mean().detach())
    assert pipeline.step(batch).loss == pytest.approx(expected)


def test_a_wrong_count_is_refused(world: dynmo.World) -> None:
    model = dynmo.Sequential(make_layers(), count=lambda targets: -1)
    pipeline = dynmo.Pipeline(model, world, microbatches=4)
    with pytest.raises(InputError, match=r"count returned -1; it must return how many targets"):
        pipeline.step(make_batch(0))


def test_an_evaluation_that_counts_nothing_is_refused(world: dynmo.World) -> None:
    pipeline = dynmo.Pipeline(dynmo.Sequential(make_layers()), world, microbatches=4)
    batch = make_batch(0)
    batch["labels"] = torch.full_like(batch["labels"], -100)
    with pytest.raises(InputError, match="the evaluation: no target of the whole batch is counted"):
        pipeline.evaluate(batch)
    outputs = pipeline.evaluate(batch, outputs=True).outputs
    assert isinstance(outputs, Tensor)
    assert outputs.shape == (12, 5, 16)


class OwnSum(nn.Module):
    """A sum that says so as torch's losses do."""

    reduction = "sum"

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().sum()


SUMS: dict[str, Any] = {
    "module": nn.MSELoss(reduction="sum"),
    "partial": partial(nn.functional.mse_loss, reduction="sum"),
    "own": OwnSum(),
}


def sum_step(
    world: dynmo.World, loss: str, microbatches: int, **options: Any
) -> tuple[float, float, dict[str, Any]]:
    """Returns the loss before, that of the step, and the weights after."""
    torch.manual_seed(0)
    layers, rows = [nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)], torch.randn(8, 3)
    whole = dynmo.Sequential(layers, SUMS[loss])
    make = partial(torch.optim.SGD, lr=0.01)
    given = {"microbatches": microbatches, "max_grad_norm": 0, "optimizer": make, **options}
    pipeline = dynmo.Pipeline(whole, world, **grouped(given))
    own = rows.chunk(options.get("replicas", 1))[pipeline.mesh.replica]
    batch = own[:, :2], own[:, 2:]
    before = pipeline.evaluate(*batch)
    loss_of_step = pipeline.step(*batch).loss
    return before, loss_of_step, {k: v.tolist() for k, v in pipeline.state_dict().items()}


@pytest.mark.parametrize("loss", SUMS)
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, {"microbatches": 1}),
        (1, {"microbatches": 8}),
        (2, {"microbatches": 4, "schedule": "zb-h1", "post_validation": True}),
        (2, {"microbatches": 2, "replicas": 2}),
    ],
)
def test_a_sum_stays_a_sum(pool: Pool, loss: str, ranks: int, options: dict[str, Any]) -> None:
    """The number of microbatches and replicas changes neither the loss nor the step."""
    told = pool.run("tests.pipeline.test_batch:sum_step", ranks, loss=loss, **options)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    rows = torch.randn(8, 3)
    wanted = SUMS[loss](plain(rows[:, :2]), rows[:, 2:])
    wanted.backward()
    torch.optim.SGD(plain.parameters(), lr=0.01).step()
    assert [each[:2] for each in told] == [pytest.approx([float(wanted.detach())] * 2)] * ranks
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(torch.tensor(told[0][2][name]), value)


@pytest.mark.parametrize("replicas", [1, 2])
def test_sampler_gives_any_number_of_replicas_the_same_batches(
    world: dynmo.World, replicas: int
) -> None:
    from dynmo.pipeline.sampler import ReplicaSampler

    rows = list(range(22))
    whole = list(ReplicaSampler(rows, 4, lambda: (0, 1), shuffle=True, seed=3))
    parts = [
        list(ReplicaSampler(rows, 4, lambda r=r: (r, replicas), shuffle=True, seed=3))
        for r in range(replicas)
    ]
    assert [list(chain(*each)) for each in zip(*parts, strict=True)] == whole
    assert len(whole) == 5
    pipeline = dynmo.Pipeline(dynmo.Sequential(make_layers()), world, microbatches=2)
    sampler = pipeline.sampler(rows, 4, seed=3)
    assert list(sampler) == whole
    sampler.set_epoch(1)
    assert list(sampler) != whole
    with pytest.raises(InputError, match="batch = 23"):
        pipeline.sampler(rows, 23)


@pytest.mark.parametrize("cases", [[], [dynmo.EarlyExit(exits=[0], start=1)]])
def test_dynmos_own_model_takes_a_dictionary(world: dynmo.World, cases: Any) -> None:
    options = dynmo.ModelOptions(blocks=2, hidden=16, heads=2, sequence=8)
    ids = torch.randint(256, (6, 8), generator=torch.Generator().manual_seed(0))

    def losses(*batch: Any) -> list[float]:
        model = dynmo.load_model(options, cases=cases)
        pipeline = dynmo.Pipeline(model, world, microbatches=2, cases=cases)
        return [pipeline.step(*batch).loss for _ in range(2)]

    whole = losses(ids, ids.roll(-1, 1))
    assert losses({"input_ids": ids, "labels": ids.roll(-1, 1)}) == whole
    parts = [{"input_ids": part, "labels": part.roll(-1, 1)} for part in ids.chunk(2)]
    assert losses(parts) == whole
