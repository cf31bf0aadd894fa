"""A process outside of a running training: it waits until rank 0 lets it in, and joins."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from dynmo.cost.layer_cost import LayerCost
from dynmo.elastic.join_requests import Newcomer, newcomer_text
from dynmo.elastic.place import own_place
from dynmo.errors import InputError, RankDied, RunError, WaitTimeout
from dynmo.models.identity import Identity
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.comm.store import find_missing, home_of, open_rendezvous, read_rendezvous

_logger = logging.getLogger(__name__)


class RunGone(InputError):
    """No run answers at the rendezvous."""


class NewcomerState(BaseModel):
    """Rank 0's message to a newcomer: its rank, and the part of the run's state no layer has.

    Attributes:
        rank: The newcomer's number.
        generation: The new generation.
        step: The next step.
        shape: Ranks of a pipeline, and number of replicas, from now on.
        layers: Layers on each stage from now on.
        shape_before: The mesh of the present ranks.
        layers_before: Layers on each of its stages.
        state: State of the run as a checkpoint has it.
        costs: Costs of the layers, for schedules that are made from costs.
        reference: Seconds that a step took at first. `elastic.repack` compares with it.
        microbatches: Microbatches of a step from now on, over all replicas.
        groups: Layers whose weights are spread over replicas: (layer, holders of each group).
    """

    model_config = ConfigDict(extra="forbid")
    rank: int
    generation: int
    step: int
    shape: tuple[int, int]
    layers: tuple[int, ...]
    shape_before: tuple[int, int]
    layers_before: tuple[int, ...]
    state: dict[str, Any]
    costs: tuple[LayerCost, ...] | None
    reference: float | None
    microbatches: int
    groups: tuple[tuple[int, tuple[tuple[int, ...], ...]], ...] = ()

    def to_text(self) -> str:
        """Returns JSON. Floats read back exactly, NaN included."""
        return json.dumps(self.model_dump())


def state_from(text: str) -> NewcomerState:
    """Reads rank 0's message. Raises RunError if it is none."""
    try:
        return NewcomerState.model_validate(json.loads(text))
    except (json.JSONDecodeError, ValidationError) as error:
        first = str(error).splitlines()[0]
        raise RunError(
            f"rank 0 sent a state that cannot be read ({first}); do all ranks run the same dynmo?"
        ) from None


def outside_world(file: Path, *, device: torch.device, timeout: float, staged: bool) -> Meeting:
    """Makes the world of a process that will join a running training.

    Args:
        file: The file that rank 0 of the training has written.
        device: Device of this process.
        timeout: Limit of each wait, in seconds.
        staged: Whether the training's messages pass through host memory.

    Raises:
        ConfigError: The file is damaged.
        RunGone: The training is not there any more.
    """
    record = read_rendezvous(file)
    try:
        store = open_rendezvous(record, timeout)
    except RunError as error:
        raise RunGone(f"{file}: {error}") from None
    home = home_of(store)
    if find_missing(home, ["here/0"]):
        raise RunGone(f"{file}: no run meets where it says")
    return Meeting.outside(home, device=device, timeout=timeout, staged=staged)


def join(
    world: Meeting, identity: Identity, take_up: Callable[[str], None], stopping: Callable[[], bool]
) -> bool:
    """Waits until rank 0 lets this process join, and joins.

    Args:
        world: This process alone.
        identity: What decides the numbers here. A process that differs is refused.
        take_up: Takes rank 0's message, and meets the other ranks.
        stopping: Whether this process shall end.

    Returns:
        False if the training is over, or this process shall end.

    Raises:
        ConfigError: Rank 0 has refused this process.
    """
    assert world.home is not None, "ranks of a program's own process groups stay"
    place = own_place(-1)
    newcomer = Newcomer(world.home, newcomer_text(place, identity), world.timeout, str(place))
    while (message := newcomer.wait(stopping)) is not None:
        try:
            take_up(message)
            return True
        except (WaitTimeout, RankDied) as error:
            # The others go on without this process, and may call it again.
            _logger.warning(f"{error}; waiting again")
            world.leave()
    return False
