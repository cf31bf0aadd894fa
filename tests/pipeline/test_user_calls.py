"""Calls inside of no_grad, inference_mode and autocast, and messages that name arguments."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynmo
from dynmo.errors import DynmoError
from dynmo.pipeline.options import grouped
from dynmo.pipeline.user_calls import with_arguments
from tests.pool import Pool
from tests.runtime.alone import alone

CONTEXTS = {
    "none": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": partial(torch.autocast, "cpu", torch.bfloat16),
}
RATE = 0.1


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(8, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 8)]


def batch() -> tuple[Tensor, Tensor]:
    """Made in the mode that is on, as a loop does."""
    draws = torch.Generator().manual_seed(1)
    return torch.randn(8, 8, generator=draws), torch.randn(8, 8, generator=draws)


def train(world: dynmo.World, mode: str, folder: str) -> tuple[list[float], str]:
    """All that a loop calls, in one context. Returns losses and the digest of the weights."""
    told: list[float] = []
    model = dynmo.Sequential(layers(), nn.functional.mse_loss)
    with CONTEXTS[mode]():
        pipeline = dynmo.Pipeline(
            model,
            world,
            microbatches=2,
            schedule="zb-h1",
            optimizer=partial(torch.optim.SGD, lr=RATE),
            training=dynmo.Training(max_grad_norm=0),
        )
        told += [pipeline.step(*batch()).loss, pipeline.evaluate(*batch())]
        if world.size == 2:
            pipeline.move([3, 1])
        pipeline.save(folder)
        told.append(pipeline.step(*batch()).loss)
        pipeline.load(folder)
        pipeline.freeze([0])
        pipeline.load_state_dict(pipeline.state_dict())
        pipeline.unfreeze([0])
        told += [pipeline.step(*batch()).loss, pipeline.evaluate(*batch())]
    return told, pipeline.digest()


def plain(mode: str) -> list[float]:
    """The same in plain torch. A new context for each microbatch casts the weights anew."""
    model = nn.Sequential(*layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        with CONTEXTS["autocast" if mode == "autocast" else "none"]():
            return nn.functional.mse_loss(model(x), y)

    def losses() -> Tensor:
        return torch.stack(list(map(loss, *(each.split(4) for each in batch()))))

    def evaluate() -> float:
        model.eval()
        mean = losses().mean()
        model.train()
        return mean.item()

    def step() -> float:
        mean = losses().mean()
        optimizer.zero_grad()
        mean.backward()
        optimizer.step()
        return mean.item()

    first = [step(), evaluate()]
    kept = step()
    return [*first, kept, kept, evaluate()]


@pytest.mark.parametrize("mode", CONTEXTS)
def test_modes_around_the_calls_change_nothing_but_what_they_should(
    pool: Pool, tmp_path: Path, mode: str
) -> None:
    told = [
        pool.run("tests.pipeline.test_user_calls:train", ranks, mode=mode, folder=str(tmp_path))
        for ranks in (1, 2)
    ]
    [(losses, digest)] = told[0]
    assert told[1] == [[losses, digest]] * 2
    assert losses == pytest.approx(plain(mode), rel=1e-5)


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_modes_keep_the_bits(pool: Pool, tmp_path: Path, mode: str) -> None:
    job = partial(pool.run, "tests.pipeline.test_user_calls:train", 1, folder=str(tmp_path))
    assert job(mode=mode) == job(mode="none")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("train.recompute = 'auto' needs", "Training.recompute = 'auto' needs"),
        ("parallel.slices = true: one process", "Parallel.slices = True: one process"),
        ("use pipeline.schedule, or call pipeline.load", "use schedule, or call pipeline.load"),
        ("pipeline.optimizer has the groups", "pipeline.optimizer has the groups"),
        ("raise parallel.work_timeout", "raise dynmo.init(work_timeout=)"),
        (
            "elastic.min_ranks = 3, no [elastic] reshape",
            "Elastic.min_ranks = 3, no elastic reshape",
        ),
        ("dynamism.mixture_of_depths.every = 3", "MixtureOfDepths.every = 3"),
        ("dynamism.cases: two; balance.initial", "cases: two; Balance.initial"),
    ],
)
def test_keys_become_arguments(text: str, wanted: str) -> None:
    assert with_arguments(text) == wanted


@pytest.mark.parametrize(
    ("options", "key", "argument"),
    [
        ({"recompute": [9]}, "train.recompute names layer 9", "Training.recompute names layer 9"),
        ({"chunks": 3}, "pipeline.chunks: ", "Parallel.chunks: "),
        ({"balance": dynmo.Balance(initial=[1])}, "balance.initial sums", "Balance.initial sums"),
        (
            {"recompute": "auto", "memory_limit": "1GiB"},
            "train.recompute = 'auto' needs",
            "Training.recompute = 'auto' needs",
        ),
    ],
)
def test_error_names_what_was_given(options: dict[str, Any], key: str, argument: str) -> None:
    def error(world: Any) -> str:
        model = dynmo.Sequential([nn.Linear(8, 8), nn.Linear(8, 8)])
        with pytest.raises(DynmoError) as caught:
            dynmo.Pipeline(model, world, microbatches=2, **grouped(options))
        return str(caught.value)

    with dynmo.init(device="cpu") as world:
        assert error(world).startswith(argument)
    assert error(alone()).startswith(key)
