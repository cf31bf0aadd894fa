"""On a CUDA device: the same code path, with the tolerance that other kernels need."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dynmo.config import parse
from dynmo.events import Event, StepEvent
from dynmo.models.model import load_model
from dynmo.runtime.clock import clock_for
from dynmo.runtime.output_cache import OutputCache
from dynmo.runtime.split_backward import Layer
from dynmo.runtime.world import World
from dynmo.trainer import Trainer

CONFIG = {
    "model": {"blocks": 2, "hidden": 64, "heads": 4, "sequence": 32},
    "train": {"steps": 6, "global_batch": 8, "micro_batch": 2, "lr": 1e-3},
    "dynamism": {"cases": ["freezing"], "freezing": {"schedule": [[3, 3]]}},
}


def losses(device: str) -> list[float]:
    config = parse(CONFIG)
    events: list[Event] = []
    with tempfile.TemporaryDirectory() as folder:
        world = World.join(dist.FileStore(str(Path(folder) / "store"), 1), 0, 1, device=torch.device(device))
        try:
            Trainer(config, world, load_model(config), None, listen=events.append).run()
        finally:
            world.close()
    return [event.loss for event in events if isinstance(event, StepEvent)]


@pytest.mark.gpu
def test_a_cuda_run_agrees_with_the_cpu() -> None:
    assert losses("cuda:0") == pytest.approx(losses("cpu"), rel=1e-3)


@pytest.mark.gpu
def test_two_cuda_runs_agree() -> None:
    assert losses("cuda:0") == pytest.approx(losses("cuda:0"), rel=1e-5)


@pytest.mark.gpu
def test_an_output_that_is_kept_comes_back_the_same() -> None:
    """It lies in host memory meanwhile."""
    device = torch.device("cuda:0")
    layer = Layer(0, torch.nn.Linear(64, 64).to(device), clock_for(device), 0)
    cache, x = OutputCache(1 << 20, clock_for(device)), (torch.randn(8, 64, device=device),)
    cache.begin(["a"], training=True)
    (made,), (kept,) = cache.forward([layer], 0, x, 0), cache.forward([layer], 0, x, 1)
    assert cache.spared == 1
    assert kept.device == made.device
    assert torch.equal(kept, made)
