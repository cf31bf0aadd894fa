"""What a config asks for on this machine: first placement, memory, device, cores."""

from __future__ import annotations

import os

import pytest
import torch

from dynmo.config import load, parse
from dynmo.errors import ConfigError
from dynmo.setup import device_for, first_partition, memory_limit, warn_of_cores


def test_first_partition() -> None:
    loaded = parse({"model": {"blocks": 3}, "parallel": {"pipeline": 3}, "balance": {"initial": [1, 2, 5]}})
    assert first_partition(loaded, 8).counts == (1, 2, 5)
    assert first_partition(parse({"model": {"blocks": 3}, "parallel": {"pipeline": 3}}), 8).counts == (3, 3, 2)
    own = {"kind": "python:a:b"}
    with pytest.raises(ConfigError, match=r"parallel.pipeline = 4 is more than the model's 3 layers; use fewer ranks"):
        first_partition(parse({"model": own, "parallel": {"pipeline": 4}}), 3)
    with pytest.raises(ConfigError, match=r"balance.initial sums to 3, but the model has 4 layers"):
        first_partition(parse({"model": own, "parallel": {"pipeline": 2}, "balance": {"initial": [1, 2]}}), 4)


def test_memory_limit_and_device() -> None:
    cpu = torch.device("cpu")
    assert memory_limit(parse({}), cpu) is None
    assert memory_limit(parse({"pipeline": {"memory_limit": "1KiB"}}), cpu) == 1024
    assert device_for(parse({"parallel": {"device": "cpu"}}), 0) == cpu
    if not torch.cuda.is_available():
        assert device_for(parse({}), 0) == cpu
        with pytest.raises(ConfigError, match="torch sees no CUDA device"):
            device_for(parse({"parallel": {"device": "cuda"}}), 0)


def test_cores() -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    assert warn_of_cores(load(overrides=[f"parallel.threads={cores}"])) is None
    assert warn_of_cores(load(overrides=[f"parallel.threads={cores + 1}"])) is not None
    assert warn_of_cores(load(overrides=[f"parallel.threads={cores + 1}", "model.kind=emulated"])) is None, "sleep needs no core"
