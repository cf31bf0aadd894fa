"""Jobs of the pool's ranks in tests of ranks that leave and join.

Each function takes the job's world first.
"""

from __future__ import annotations

from typing import Any

from dynmo.elastic.join_requests import Newcomer, join_request_text
from dynmo.elastic.member import own_member
from dynmo.errors import ConfigError, RunError
from dynmo.runtime.comm.world import World
from dynmo.runtime.state import migration
from dynmo.train.joining import come_back
from dynmo.train.trainer import Trainer
from tests.jobs import model_of, parsed, train_elastic


def with_newcomer(world: World, config: dict[str, Any], newcomer: str) -> dict[str, Any]:
    """All but the last rank train once the last one has asked to join.

    Args:
        world: World of all ranks.
        config: Configuration of the run.
        newcomer: Action of the last rank when it is called: "joins", "stays away", "has no room"
            or "has other code".
    """
    last = world.size - 1
    assert world.home is not None
    if world.rank < last:
        world.home.wait(["join/here/1"])
        world.renew(world.rank, last, world.generation + 1, 20)
        return train_elastic(world, config)
    world.leave()
    loaded = parsed(config)
    identity = Trainer(loaded, world, model_of(loaded), None).pipeline.identity
    if newcomer == "stays away":
        Newcomer(world.home, join_request_text(own_member(-1), identity), 20).wait()
        return {"left": True}
    if newcomer == "has other code":
        other = identity.model_copy(update={"code": {"own.py": "other"}})
        try:
            Newcomer(world.home, join_request_text(own_member(-1), other), 20).wait()
        except ConfigError as error:
            return {"left": True, "error": str(error)}
    if newcomer == "joins":
        return _come(world, config)
    usual = migration.check_announced

    def full(*_: object) -> None:
        raise RunError("no room for a layer")

    migration.check_announced = full
    try:
        return _come(world, config)
    except RunError as error:
        return {"left": True, "error": str(error)}
    finally:
        migration.check_announced = usual


def _come(world: World, config: dict[str, Any]) -> dict[str, Any]:
    loaded = parsed(config)
    result = come_back(Trainer(loaded, world, model_of(loaded), None))
    if result is None:
        return {"left": True, "digest": ""}
    return {"left": result.left, "digest": result.weights_digest}


def cannot_give(world: World, config: dict[str, Any]) -> dict[str, Any]:
    """As `train_elastic`, on ranks of which the last cannot pack a layer."""
    usual = migration.pack

    def fail(*_: object) -> Any:
        raise OSError("no memory to pack")

    if world.rank == world.size - 1:
        migration.pack = fail
    try:
        return train_elastic(world, config)
    finally:
        migration.pack = usual
