"""Effects of a config on this machine: placement, memory, device and cores."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from dynmo.config import Config, load, parse
from dynmo.errors import ConfigError
from dynmo.pipeline.placing import first_partition, rank_memory_limit
from dynmo.runtime.comm.world import World
from dynmo.schedule.memory import Limit
from dynmo.train.setup import device_for, warnings_of


def limit_of(config: Config, device: torch.device, others: Sequence[int] = ()) -> Limit:
    """The limit of a rank of a world of the config's ranks on this device.

    `others` are the limits of the ranks behind this one. None: they are equal.
    """

    def gather(own: torch.Tensor, what: str) -> torch.Tensor:
        del what
        return torch.stack([own, *map(torch.tensor, others)])

    staged = config.parallel.staged
    world = SimpleNamespace(
        device=device,
        staged=staged,
        is_outside=False,
        everyone=SimpleNamespace(size=config.ranks, gather=gather),
    )
    return rank_memory_limit(config.options, cast(World, world))


def test_first_partition_follows_the_config() -> None:
    loaded = parse(
        {"model": {"blocks": 3}, "parallel": {"pipeline": 3}, "balance": {"initial": [1, 2, 5]}}
    )
    assert first_partition(loaded.options, 8).counts == (1, 2, 5)
    assert first_partition(
        parse({"model": {"blocks": 3}, "parallel": {"pipeline": 3}}).options, 8
    ).counts == (3, 3, 2)


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
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    assert warnings_of(load(overrides=[f"parallel.threads={cores}"])) == []
    (warning,) = warnings_of(load(overrides=[f"parallel.threads={cores + 1}"]))
    assert f"on {cores} cores" in warning
    more = [f"parallel.threads={cores + 1}", "model.kind=emulated"]
    assert warnings_of(load(overrides=more)) == [], "sleep needs no core"


def test_cuda_variables_are_set_before_cuda_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables are set before torch looks for a device.

    Values that the user has set stay.
    """
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


def test_ranks_share_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five ranks over gloo share two GPUs in turn. Each has a third of the memory.

    NCCL refuses to share a GPU.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 << 30)
    )
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    shared = parse({"model": {"blocks": 3}, "parallel": {"pipeline": 5, "backend": "gloo"}})
    assert [device_for(shared, rank).index for rank in range(5)] == chosen == [0, 1, 0, 1, 0]
    whole = limit_of(parse({}), torch.device("cuda", 0))
    assert isinstance(whole, int)
    assert limit_of(shared, torch.device("cuda", 0)) == whole // 3
    with pytest.raises(
        ConfigError,
        match=(
            r"local rank 2 has no CUDA device \(2 here\).* parallel.backend = 'gloo', which lets "
            r"ranks share one"
        ),
    ):
        device_for(parse({"model": {"blocks": 3}, "parallel": {"pipeline": 5}}), 2)


def test_memory_limit_leaves_a_reserve_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 << 30)
    )
    cuda = torch.device("cuda", 0)
    whole = limit_of(parse({}), cuda)
    assert isinstance(whole, int)
    assert 72 << 30 < whole < 73 << 30
    assert limit_of(parse({"parallel": {"pipeline": 4, "slices": True}}), cuda) == whole // 4
    assert limit_of(parse({"pipeline": {"memory_limit": "80GiB"}}), cuda) == 80 << 30


def test_ranks_agree_on_limits_of_unequal_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of a pipeline has the least of its replicas' devices."""
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 << 30)
    )
    cuda = torch.device("cuda", 0)
    own = limit_of(parse({}), cuda)
    assert isinstance(own, int)
    two = parse({"parallel": {"pipeline": 2}})
    assert limit_of(two, cuda, [own]) == own
    assert limit_of(two, cuda, [5000]) == (own, 5000)
    mesh = {"parallel": {"pipeline": 2, "replicas": 2}}
    assert limit_of(parse(mesh), cuda, [7000, 5000, own]) == (7000, 5000)
    changes = parse(mesh | {"elastic": {"reshape": True}, "train": {"reduction_slots": 4}})
    assert limit_of(changes, cuda, [7000, 5000, own]) == 5000
