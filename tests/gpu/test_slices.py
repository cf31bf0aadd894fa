"""Slices of one GPU are disjoint.

A pipeline on slices trains the same as one stage on the whole GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from dynmo.config import parse
from dynmo.errors import ConfigError
from dynmo.events import EndEvent, Event, StepEvent
from dynmo.runtime.comm.world import World
from dynmo.runtime.engine.sm_slices import cut
from dynmo.train.setup import device_for, model_of
from dynmo.train.trainer import Trainer
from tests.equality import RANDOM_MOVES
from tests.jobs import SOURCE

SHAPE = {"blocks": 4, "hidden": 128, "heads": 4, "sequence": 64, "dropout": 0.1}


def run(device: torch.device, parallel: dict[str, Any], schedule: str) -> tuple[list[float], str]:
    """Trains on slices of one device.

    Layers move at every step and freeze, if there is more than one stage.

    Args:
        device: The GPU.
        parallel: The section [parallel].
        schedule: Name of the schedule.

    Returns:
        The losses, and the digest of the weights.
    """
    config = parse(
        {
            "data": {"source": SOURCE},
            "model": SHAPE,
            "train": {
                "steps": 8,
                "global_batch": 16,
                "micro_batch": 2,
                "lr": 1e-3,
                "deterministic": True,
            },
            "parallel": {"device": device.type} | parallel,
            "pipeline": {"schedule": schedule},
            "balance": {"balancer": RANDOM_MOVES, "every": 1},
            "dynamism": {"cases": ["freezing"], "freezing": {"schedule": [[3, 3]]}},
        }
    )
    events: list[Event] = []
    world = World(0, 1, device_for(config, 0), 120.0, 0, dist.HashStore())
    Trainer(config, world, model_of(config), None, listen=events.append).run()
    (end,) = [event for event in events if isinstance(event, EndEvent)]
    return [event.loss for event in events if isinstance(event, StepEvent)], end.weights_digest


@pytest.fixture
def cuda_core(device: torch.device) -> None:
    if device.type == "cuda":
        pytest.importorskip("cuda.core")


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda", "cuda_core")
@pytest.mark.parametrize("slices", [2, 3, 4])
def test_slices_are_disjoint_and_equal(slices: int) -> None:
    cuts = cut(0, slices)
    assert len({each.stream.cuda_stream for each in cuts}) == slices
    assert len({each.sms for each in cuts}) == 1
    assert cuts[0].sms * slices <= torch.cuda.get_device_properties(0).multi_processor_count
    assert cut(0, slices) is cuts


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda", "cuda_core")
def test_more_slices_than_multiprocessors_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"parallel\.slices"):
        cut(0, 10_000)


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda_core")
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
def test_a_pipeline_on_slices_trains_the_same(device: torch.device, schedule: str) -> None:
    """The results are close to those of the whole GPU.

    cuBLAS may choose another kernel for a stream with fewer SMs. Memory that is reused too early
    would give a large difference. So would a tensor that is read too early.
    """
    losses, digest = run(device, {"pipeline": 3, "slices": True}, schedule)
    assert losses == pytest.approx(run(device, {"pipeline": 1}, "1f1b")[0], rel=1e-3)
    assert run(device, {"pipeline": 3, "slices": True}, schedule) == (losses, digest)
