"""A pipeline on disjoint slices of one GPU trains the same as one stage on the whole GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from dynmo.config import parse
from dynmo.errors import ConfigError
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.comm.signed_store import SignedStore
from dynmo.runtime.engine.stage_streams import cut
from dynmo.train.setup import device_for
from tests.gpu.test_ranks import CONFIG, TRAIN
from tests.jobs import train


def run(device: torch.device, parallel: dict[str, Any], schedule: str) -> dict[str, Any]:
    """Losses and digest. Layers move at every step and freeze, if there is more than one stage."""
    parallel = {"device": device.type} | parallel
    sections = {"train": TRAIN, "parallel": parallel, "pipeline": {"schedule": schedule}}
    config = CONFIG | sections
    world = Meeting(0, 1, device_for(parse(config), 0), 120.0, 0, SignedStore(dist.HashStore()))
    return train(world, config)


@pytest.fixture
def cuda_core(device: torch.device) -> None:
    if device.type == "cuda":
        pytest.importorskip("cuda.core")


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda", "cuda_core")
@pytest.mark.parametrize("slices", [2, 3, 4])
def test_slices_are_disjoint_and_equal(slices: int) -> None:
    """More slices than multiprocessors are refused."""
    cuts = cut(0, slices)
    assert len({each.stream.cuda_stream for each in cuts}) == slices
    assert len({each.sms for each in cuts}) == 1
    assert cuts[0].sms * slices <= torch.cuda.get_device_properties(0).multi_processor_count
    assert cut(0, slices) is cuts
    with pytest.raises(ConfigError, match=r"parallel\.slices"):
        cut(0, 10_000)


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda_core")
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
def test_a_pipeline_on_slices_trains_the_same(device: torch.device, schedule: str) -> None:
    """cuBLAS may choose another kernel. Memory that is reused too early differs by more."""
    first, again = (run(device, {"pipeline": 3, "slices": True}, schedule) for _ in range(2))
    whole = run(device, {"pipeline": 1}, "1f1b")
    assert first["losses"] == pytest.approx(whole["losses"], rel=1e-3)
    assert [again[key] for key in ("losses", "digest")] == [first["losses"], first["digest"]]
