"""Optimizers of torch in a pipeline, against the same ones over the whole model in one process."""

from __future__ import annotations

import gc
import logging
import weakref
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn

import dynmo
from dynmo.errors import CheckpointError, ConfigError
from dynmo.pipeline.optimizer_options import TorchOptimizer
from tests.combinations import mostly_matrix
from tests.equality import BALANCERS
from tests.pipeline import jobs
from tests.pipeline.adapters import store_of
from tests.pipeline.optimizer_jobs import ADAMW, MICROBATCHES, OPTIMIZERS, batch, layers, make
from tests.pool import Pool

JOBS = "tests.pipeline.optimizer_jobs:"
ELEMENTWISE = ["adamw", "nesterov", "radam", "adagrad"]
OTHERS = [name for name in OPTIMIZERS if name not in ELEMENTWISE]
# Groups of microbatches sum gradients in another order than a plain loop.
NEAR = 1e-6


@pytest.mark.parametrize(
    ("saves", "resumes", "names"),
    mostly_matrix(
        [(1, 3, [*OPTIMIZERS]), (2, 3, OTHERS), (2, 3, ELEMENTWISE), (3, 2, [*OPTIMIZERS])],
        everyday=[(2, 3, OTHERS)],
    ),
)
def test_any_ranks_moves_and_resumes_train_like_torch(
    pool: Pool, tmp_path: Path, saves: int, resumes: int, names: list[str]
) -> None:
    digests = dict[str, str]()
    for ranks in (saves, resumes):
        given = {"names": names, "folder": str(tmp_path), "resumes": ranks == resumes}
        for row in zip(*pool.run(JOBS + "train", ranks, **given), strict=True):
            for each in row:
                name = each["name"]
                assert each["weights"] == digests.setdefault(name, each["weights"]), name
                assert each["difference"] == 0, name
                assert each["bytes"] == row[0]["bytes"]
    assert len(set(digests.values())) == len(names)


@pytest.mark.parametrize("zero", mostly_matrix([0, 1], everyday=[1]))
def test_replicas_train_like_torch(pool: Pool, tmp_path: Path, zero: int) -> None:
    """Two replicas, whole or sharded, and a resume on one rank."""
    names = ELEMENTWISE if zero else [*OPTIMIZERS]
    given = {"names": names, "folder": str(tmp_path), "microbatches": 2, "replicas": 2}
    row = pool.run(JOBS + "train", 2, resumes=False, zero=zero, **given)[0]
    given |= {"microbatches": MICROBATCHES, "replicas": 1, "reduction_slots": 2}
    alone = pool.run(JOBS + "train", 1, resumes=True, **given)[0]
    for each, resumed in zip(row, alone, strict=True):
        assert each["difference"] <= NEAR, each["name"]
        assert resumed["weights"] == each["weights"], each["name"]


@pytest.mark.parametrize("rollback", mostly_matrix(["exact", "in-place"], everyday=["in-place"]))
def test_steps_are_taken_back_by_copies(pool: Pool, tmp_path: Path, rollback: str) -> None:
    """Each step overflows the norm: it is made, taken back and made again with clipping."""
    names = OTHERS if rollback == "in-place" else [*OPTIMIZERS]
    given = {"names": names, "folder": str(tmp_path), "resumes": False, "max_grad_norm": 0.05}
    expected = pool.run(JOBS + "train", 2, **given)[0]
    rows = pool.run(JOBS + "advance", 2, names=names, rollback=rollback, max_grad_norm=0.05)
    for each, other in zip(rows[0], expected, strict=True):
        assert each["weights"] == other["weights"], each["name"]
        assert each["rollbacks"] > 0


def test_in_place_rollback_of_a_torch_optimizer_says_that_it_copies(
    world: dynmo.World, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        make(world, "radam", post_validation=True, rollback="in-place")
    assert [record.getMessage() for record in caplog.records] == [
        'pipeline.rollback = "in-place": no inverse of radam is known, so copies are kept to take '
        "a step back"
    ]
    costs = make(world, "adafactor", post_validation=True, rollback="in-place").measured.costs()
    assert costs[0].rollback_bytes == 4 * (24 + 6 + 4 + 6 + 6)  # weight, its rows and columns, bias


def test_low_precision_trains_masters(world: dynmo.World) -> None:
    for name in OPTIMIZERS:
        pipeline = make(world, name, precision="bfloat16")
        losses = [pipeline.step(*batch(0)).loss for _ in range(3)]
        weight = pipeline.mesh.modules[0].get_parameter("weight")
        assert weight.dtype == torch.bfloat16
        assert torch.equal(pipeline.state_dict()["0.weight"].bfloat16(), weight)
        assert losses[-1] < losses[0]


def test_own_optimizers_take_groups(world: dynmo.World) -> None:
    """They equal torch's. Weight decay acts on matrices, or where it is given."""

    def rule(name: str, p: nn.Parameter) -> dict[str, Any] | None:
        return {"0.weight": {"lr": 1e-3}, "0.bias": {"weight_decay": 0.3}}.get(name)

    def torch_rule(name: str, p: nn.Parameter) -> dict[str, Any]:
        return {"weight_decay": 0.01 if p.dim() > 1 else 0.0, **(rule(name, p) or {})}

    for own, torch_own in (
        (dynmo.AdamW(lr=1e-2), partial(torch.optim.AdamW, lr=1e-2, fused=True)),
        (
            dynmo.SGD(lr=1e-2, weight_decay=0.01, momentum=0.9),
            partial(torch.optim.SGD, lr=1e-2, momentum=0.9, fused=True),
        ),
    ):
        ours, theirs = (
            jobs.make(world, layers(), optimizer=optimizer, groups=groups)
            for optimizer, groups in ((own, rule), (torch_own, torch_rule))
        )
        assert [group["lr"] for group in ours.optimizer.param_groups] == [1e-3, 1e-2, 1e-2]
        for pipeline in (ours, theirs):
            schedulers = torch.optim.lr_scheduler.OneCycleLR(pipeline.optimizer, 0.1, 9)
            for step in range(4):
                pipeline.step(*batch(step))
                schedulers.step()
        assert ours.digest() == theirs.digest()


def test_options_are_set_by_hand(world: dynmo.World) -> None:
    pipeline = make(world, "muon")
    groups = pipeline.optimizer.param_groups
    assert [sorted(map(tuple, (p.shape for p in group["params"]))) for group in groups] == [
        [(3, 6), (6, 4), (6, 6)],
        [(3,), (6,), (6,), (6,), (6,)],
    ]
    assert groups[0]["ns_steps"] == 5
    assert "betas" in groups[1]
    groups[0]["lr"] = groups[0]["weight_decay"] = 0.0
    before = {key: value.clone() for key, value in pipeline.state_dict().items()}
    pipeline.step(*batch(0))
    after = pipeline.state_dict()
    assert all(torch.equal(before[key], after[key]) == (before[key].dim() == 2) for key in before)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_memory_of_a_layer_that_goes_is_freed(world: dynmo.World, name: str) -> None:
    pipeline = make(world, name, precision="bfloat16")
    pipeline.step(*batch(0))
    store = store_of(pipeline)
    old = weakref.ref(store.optimizers[0].masters["weight"])
    store.rebuild(0, store.moments(0))
    gc.collect()
    assert old() is None


def test_adamw_of_torch_goes_on_from_dynmos_and_another_is_refused(
    world: dynmo.World, tmp_path: Path
) -> None:
    first = make(world, "adamw", optimizer=dynmo.AdamW(lr=1e-2), groups=None)
    first.step(*batch(0))
    first.save(tmp_path)
    second = make(world, "adamw", resume=tmp_path)
    second.step(*batch(1))
    assert second.steps == 2
    second.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"optimizer = 'adamw', this one has 'adagrad'"):
        make(world, "adagrad", resume=tmp_path)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"optimizer": torch.optim.LBFGS}, "LBFGS calls the model by a closure and needs all"),
        ({"optimizer": torch.optim.SparseAdam}, "SparseAdam cannot make a step: SparseAdam does"),
        ({"optimizer": torch.optim.Muon}, "Muon only supports 2D .*tried for 0.bias; groups can"),
        ({"optimizer": lambda p: p}, "returned an object of list; return an optimizer"),
        (
            {
                "optimizer": lambda given: torch.optim.SGD(given[0]["params"]),
                "groups": lambda name, p: {"lr": 0.1} if name == "0.bias" else None,
            },
            "makes groups of its own; let it keep the list",
        ),
        ({"optimizer": lambda given: 1 / 0}, "optimizer: <lambda>: division by zero"),
        ({"optimizer": ADAMW, "groups": lambda n, p: {"mu": 1}}, "0.weight gets 'mu', which AdamW"),
        ({"groups": lambda n, p: {"mu": 1}}, "0.weight gets 'mu', which dynmo's adamw does not"),
        ({"groups": lambda n, p: {"optimizer": ADAMW}}, "0.weight gets an optimizer of its own"),
        ({"groups": lambda n, p: 1}, "0.weight gets an object of int; return a dict"),
        ({"groups": lambda n, p: 1 / 0}, "0.weight raised ZeroDivisionError"),
    ],
)
def test_what_cannot_train_is_refused(
    world: dynmo.World, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason) as refused:
        jobs.make(world, layers(), **options)
    assert "\n" not in str(refused.value)


def test_zero_takes_what_works_element_by_element(pool: Pool) -> None:
    said = pool.run(
        JOBS + "sharded", 2, names=["muon", "adafactor", "counting", *get_args(TorchOptimizer)]
    )
    assert said[0] == said[1]
    refused = {name: reason for name, reason in said[0].items() if reason}
    assert refused.keys() == {"muon", "adafactor", "counting"}
    assert all("does not work element by element" in reason for reason in refused.values())
    assert refused["adafactor"].startswith("zero = 1: Adafactor ")


@pytest.mark.parametrize(
    "optimizer",
    mostly_matrix(
        ["radam", "adafactor", "python:tests.pipeline.optimizer_jobs:Counting"], ["adafactor"]
    ),
)
def test_optimizers_of_the_file_train_experts_anywhere(pool: Pool, optimizer: str) -> None:
    """Two replicas share the experts. Layers move between two ranks."""
    train = {"steps": 3, "global_batch": 8, "micro_batch": 1, "lr": 1e-2, "reduction_slots": 2}
    config: dict[str, Any] = {
        "model": {"kind": "moe", "blocks": 1, "hidden": 16, "heads": 2, "sequence": 8},
        "train": train | {"optimizer": optimizer},
        "balance": BALANCERS["none"],
    }
    spread = {"parallel": dict.fromkeys(("pipeline", "replicas", "expert"), 2)}
    (alone,) = pool.run("train", 1, config=config)
    rows = pool.run("train", 4, config=config | spread | {"balance": BALANCERS["random"]})
    assert rows[0]["digest"] == alone["digest"]


def test_names_of_the_file_are_those_of_torch() -> None:
    classes = [getattr(torch.optim, name) for name in dir(torch.optim)]
    names = {
        each.__name__.lower()
        for each in classes
        if isinstance(each, type) and issubclass(each, torch.optim.Optimizer)
    }
    assert {*get_args(TorchOptimizer)} == names - {
        "optimizer",
        "adamw",
        "sgd",
        "lbfgs",
        "sparseadam",
    }


@pytest.mark.parametrize("name", ["counting", "muon"])
def test_the_code_of_an_optimizer_is_part_of_the_identity(world: dynmo.World, name: str) -> None:
    assert "tests/pipeline/optimizer_jobs.py" in make(world, name).mesh.identity.code
