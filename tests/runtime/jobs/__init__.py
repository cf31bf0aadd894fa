"""Jobs of the pool's ranks, and what they share. The world comes first."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from dynmo.errors import DynmoError
from dynmo.runtime.comm.rank_group import RankGroup


def error_of(call: Callable[[], object]) -> list[str]:
    """The kind and the text of the error that a call ends with."""
    try:
        call()
    except DynmoError as error:
        return [type(error).__name__, str(error)]
    return []


def lose_patience(world: RankGroup) -> None:
    """Once all are here, a collective has a short limit. The job closes its world afterwards."""
    world.barrier("all to be here")
    world.timeout = 0.5
    group: Any = world.process_group or world.group
    group.set_timeout(timedelta(seconds=world.timeout))
