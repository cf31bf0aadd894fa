"""Jobs of the pool's ranks in tests of ranks that leave and join."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest

from dynmo.elastic.manager import own_place
from dynmo.elastic.newcomer import Newcomer, newcomer_text
from dynmo.errors import ConfigError, RunError
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.state import layer_store, migration
from dynmo.train.run import come_back
from dynmo.train.trainer import Trainer
from tests.jobs import model_of, parsed, train_elastic
from tests.runtime.fake_time import emulated_time


def with_newcomer(world: Meeting, config: dict[str, Any], newcomer: str) -> dict[str, Any]:
    """All but the last rank train once the last one has asked to join.

    When that one is called, it "joins", "stays away", "has no room" or "has other code".
    """
    last = world.size - 1
    assert world.home is not None
    if world.rank < last:
        world.home.wait(["join/here/1"])
        world.renew(world.rank, last, world.generation + 1, 20)
        return train_elastic(world, config)
    world.leave()
    loaded = parsed(config)
    identity = Trainer(loaded, world, model_of(loaded), None).pipeline._parts.identity
    if newcomer == "stays away":
        Newcomer(world.home, newcomer_text(own_place(-1), identity), 20).wait()
        return {"left": True}
    if newcomer == "has other code":
        other = identity.model_copy(update={"code": {"own.py": "other"}})
        with pytest.raises(ConfigError) as refused:
            Newcomer(world.home, newcomer_text(own_place(-1), other), 20).wait()
        return {"left": True, "error": str(refused.value)}
    if newcomer == "joins":
        return _come(world, config)
    full = mock.Mock(side_effect=RunError("no room for a layer"))
    with mock.patch.object(migration, "room_for", full), pytest.raises(RunError) as failed:
        _come(world, config)
    return {"left": True, "error": str(failed.value)}


def _come(world: Meeting, config: dict[str, Any]) -> dict[str, Any]:
    loaded = parsed(config)
    result = come_back(Trainer(loaded, world, model_of(loaded), None))
    if result is None:
        return {"left": True, "digest": ""}
    return {"left": result.left, "digest": result.weights_digest}


def small_machine_first(world: Meeting, config: dict[str, Any]) -> dict[str, Any]:
    """As `train_elastic`, with rank 0 alone on a machine that is the first to be given back."""
    node = "other" if world.rank else "first"
    with mock.patch.dict(os.environ, {"SLURMD_NODENAME": node}):
        return train_elastic(world, config)


def at_speeds(world: Meeting, config: dict[str, Any]) -> dict[str, Any]:
    """As `train_elastic`, in emulated time. Each rank has its speed in `model.speeds`."""
    with mock.patch.dict(os.environ, {"RANK": str(world.rank)}), emulated_time():
        return train_elastic(world, config)


def cannot_give(world: Meeting, config: dict[str, Any]) -> dict[str, Any]:
    """As `train_elastic`, on ranks of which the last cannot pack a layer."""
    fail = mock.Mock(side_effect=OSError("no memory to pack"))
    pack = fail if world.rank == world.size - 1 else layer_store.pack
    with mock.patch.object(layer_store, "pack", pack):
        return train_elastic(world, config)
