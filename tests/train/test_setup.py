"""Effects of a config on this machine: placement, memory, device and cores."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from dynmo.config import Config, load, parse
from dynmo.errors import ConfigError
from dynmo.pipeline.assembly import first_partition, rank_memory_limit
from dynmo.runtime.comm.meeting import Meeting
from dynmo.schedule.memory import Limit
from dynmo.train.setup import device_for, warnings_of


def limit_of(config: Config, device: torch.device, others: Sequence[int] = ()) -> Limit:
    """The limit of a rank on this device. `others` are those of the ranks behind, if unequal."""

    def gather(own: torch.Tensor, what: str) -> torch.Tensor:
        del what
        return torch.stack([own, *map(torch.tensor, others)])

    known = {"staged": config.parallel.staged, "is_outside": False, "device": device}
    world = Mock(spec=Meeting, size=config.ranks, gather=gather, **known)
    world.everyone = world
    return rank_memory_limit(config.options, world)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A GPU of 80 GiB, as far as torch says."""
    found = SimpleNamespace(total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    return torch.device("cuda", 0)


def test_first_partition_follows_the_config() -> None:
    given = {"model": {"blocks": 3}, "parallel": {"pipeline": 3}}
    placed = parse(given | {"balance": {"initial": [1, 2, 5]}})
    assert first_partition(placed.options, 8).counts == (1, 2, 5)
    assert first_partition(parse(given).options, 8).counts == (3, 3, 2)


def test_memory_limit_and_device_follow_the_config() -> None:
    cpu = torch.device("cpu")
    assert limit_of(parse({}), cpu) is None
    assert limit_of(parse({"pipeline": {"memory_limit": "1KiB"}}), cpu) == 1024
    assert device_for(parse({"parallel": {"device": "cpu"}}), 0) == cpu
    if not torch.cuda.is_available():
        assert device_for(parse({}), 0) == cpu
        with pytest.raises(ConfigError, match="torch sees no CUDA device"):
            device_for(parse({"parallel": {"device": "cuda"}}), 0)


def test_too_few_cores_give_a_warning() -> None:
    every = os.cpu_count() or 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else every
    assert warnings_of(load(overrides=[f"parallel.threads={cores}"])) == []
    (warning,) = warnings_of(load(overrides=[f"parallel.threads={cores + 1}"]))
    assert f"on {cores} cores" in warning
    more = [f"parallel.threads={cores + 1}", "model.kind=emulated"]
    assert warnings_of(load(overrides=more)) == [], "sleep needs no core"


def test_idle_gpus_give_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    (warning,) = warnings_of(parse({}))
    assert warning.startswith("4 GPUs here, and 1 rank: the other GPUs idle; parallel.pipeline")
    assert not any("GPU" in each for each in warnings_of(parse({"parallel": {"replicas": 4}})))
    assert warnings_of(parse({"parallel": {"device": "cpu"}})) == []


def test_torchrun_does_not_let_ranks_survive(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"elastic": {"recover": "memory"}, "parallel": {"device": "cpu"}}
    assert warnings_of(parse(given)) == []
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    (warning,) = warnings_of(parse(given))
    assert warning.startswith("torchrun stops all its workers")
    assert warnings_of(parse({"parallel": {"device": "cpu"}})) == []


def test_cuda_variables_are_set_before_cuda_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch has not looked for a device yet. Values that the user has set stay."""
    names = ("CUBLAS_WORKSPACE_CONFIG", "CUDA_MODULE_LOADING", "CUDA_DEVICE_MAX_CONNECTIONS")
    seen: list[list[str | None]] = []

    def is_available() -> bool:
        seen.append([os.environ.get(name) for name in names])
        return False

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    for parallel in ({"pipeline": 1}, {"pipeline": 2}, {"pipeline": 2, "device": "cpu"}):
        for name in names:
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
        device_for(parse({"parallel": parallel}), 0)
    assert seen == [[":4096:8", None, None], [":4096:8", "EAGER", "32"], [None, None, None]]
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")
    device_for(parse({"parallel": {"pipeline": 2}}), 0)
    assert seen[-1][1] == "LAZY"


def test_ranks_share_a_device(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five ranks over gloo share two GPUs in turn. NCCL refuses to share a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    shared = parse({"model": {"blocks": 3}, "parallel": {"pipeline": 5, "backend": "gloo"}})
    assert [device_for(shared, rank).index for rank in range(5)] == chosen == [0, 1, 0, 1, 0]
    whole = limit_of(parse({}), gpu)
    assert isinstance(whole, int)
    assert limit_of(shared, gpu) == whole // 3
    says = r"local rank 2 has no CUDA device \(2 here\).* parallel.backend = 'gloo', which lets "
    with pytest.raises(ConfigError, match=f"{says}ranks share one"):
        device_for(parse({"model": {"blocks": 3}, "parallel": {"pipeline": 5}}), 2)


def test_ranks_agree_on_limits_that_leave_a_reserve(gpu: torch.device) -> None:
    """A rank of a pipeline has the least of its replicas' devices."""
    own = limit_of(parse({}), gpu)
    assert isinstance(own, int)
    assert 72 << 30 < own < 73 << 30
    assert limit_of(parse({"parallel": {"pipeline": 4, "slices": True}}), gpu) == own // 4
    assert limit_of(parse({"pipeline": {"memory_limit": "80GiB"}}), gpu) == 80 << 30
    two = parse({"parallel": {"pipeline": 2}})
    assert limit_of(two, gpu, [own]) == own
    assert limit_of(two, gpu, [5000]) == (own, 5000)
    mesh = {"parallel": {"pipeline": 2, "replicas": 2}}
    assert limit_of(parse(mesh), gpu, [7000, 5000, own]) == (7000, 5000)
    changes = parse(mesh | {"elastic": {"reshape": True}, "train": {"reduction_slots": 4}})
    assert limit_of(changes, gpu, [7000, 5000, own]) == 5000
