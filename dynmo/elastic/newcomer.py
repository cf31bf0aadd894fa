"""A process outside of a running training: it waits until rank 0 lets it in, and joins.

    newcomer   asks: "host a, pid 7"   beat .. beat .. beat ..           let in: rank 2 of 4
    rank 0                             look(): who is there, alive       let_in(...)

Both sides meet in the store of the run. A newcomer waits until the run needs it, or is over.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from dynmo.cost.layer_cost import LayerCost
from dynmo.elastic.manager import RankPlace, own_place
from dynmo.errors import ConfigError, DynmoError, InputError, RankDied, RunError, WaitTimeout
from dynmo.models.identity import Identity, identity_from
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.comm.rendezvous import read_rendezvous
from dynmo.runtime.comm.signed_store import Forged, SignedStore
from dynmo.runtime.comm.store import (
    LOST,
    find_missing,
    home_of,
    open_rendezvous,
)
from dynmo.runtime.comm.waits import call_with_limit, reason

_logger = logging.getLogger(__name__)

# Most seconds between two signs of life of a newcomer, and seconds between two looks of it.
_BEAT, _POLL = 1.0, 0.05
# Most newcomers of a run.
MOST = 10_000

Result = TypeVar("Result")


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
        former: The mesh to which the run goes back after a fault, as the arguments of `NextMesh`.
        postponed: A planned mesh whose ranks did not come.
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
    former: tuple[int, int, tuple[int, ...], int, str] | None = None
    postponed: tuple[int, int] | None = None
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


class Newcomer:
    """A process that waits to join. It may ask again after it was a rank."""

    def __init__(
        self, home: SignedStore, text: str, timeout: float, name: str = "a newcomer"
    ) -> None:
        self._store = home.within("join")
        self._text = text
        self._timeout = timeout
        self._name = name
        self._heard = 0.0  # time of rank 0's last sign of life

    def wait(self, stopping: Callable[[], bool] = lambda: False) -> str | None:
        """Waits until it is let in. None if the run is over or `stopping` says so."""
        try:
            self._heard = time.monotonic()
            return self._wait(self._ask(self._request), stopping)
        except DynmoError:
            raise
        except LOST as error:
            why = reason(error) or type(error).__name__
            raise RankDied(
                f"lost the store of rank 0 while waiting to join ({why}); the run has ended"
            ) from None

    def _ask(self, call: Callable[[], Result]) -> Result:
        """Calls the store. Its answer must come within what is left of the limit."""
        silent = time.monotonic() - self._heard
        if silent < self._timeout:
            with suppress(TimeoutError):
                return call_with_limit(self._timeout - silent, call)
        raise WaitTimeout(
            f"{self._name} waited {self._timeout:g} s for rank 0, which gives no sign of life; was "
            "the run killed?",
            [0],
        )

    def _request(self) -> int:
        ticket = next((each for each in range(1, MOST) if self._claims(each)), None)
        if ticket is None:
            raise RunError(f"{MOST} processes have asked to join this run; start it anew")
        self._store.set(f"beat/{ticket}", "0")
        self._store.set(f"here/{ticket}", self._text)
        return ticket

    def _claims(self, ticket: int) -> bool:
        with suppress(Forged):
            return self._store.claim(f"ticket/{ticket}")
        return False

    def _wait(self, ticket: int, stopping: Callable[[], bool]) -> str | None:
        beats, next_beat, pulse = 0, 0.0, b""
        pause = min(_BEAT, self._timeout / 4)
        while True:
            if message := self._ask(lambda: self._read(f"state/{ticket}")):
                return message.decode()
            if refused := self._ask(lambda: self._read(f"refused/{ticket}")):
                raise ConfigError(refused.decode())
            if stopping() or self._ask(lambda: self._read("over")):
                return None
            now = time.monotonic()
            if now >= next_beat:
                beats, next_beat = beats + 1, now + pause
                new = self._ask(partial(self._beat, ticket, beats))
                if new != pulse:
                    pulse, self._heard = new, now
            time.sleep(_POLL)

    def _beat(self, ticket: int, beats: int) -> bytes:
        """Gives a sign of life, and returns rank 0's."""
        self._store.set(f"beat/{ticket}", str(beats))
        return self._read("pulse")

    def _read(self, key: str) -> bytes:
        return genuine(self._store, key) or b""


def genuine(store: SignedStore, key: str) -> bytes | None:
    """Returns a value that the run has written, or None."""
    with suppress(Forged):
        return store.find(key)
    return None


def newcomer_text(place: RankPlace, identity: Identity) -> str:
    return json.dumps({"place": asdict(place), "identity": identity.model_dump()})


def newcomer_from(text: str) -> tuple[RankPlace, Identity]:
    """Reads the text of `newcomer_text`."""
    try:
        record = json.loads(text)
        return RankPlace(**record["place"]), identity_from(record["identity"])
    except (ValueError, TypeError, LookupError):
        raise RunError("what it says of itself cannot be read") from None


def outside_world(
    file: Path, *, device: torch.device, timeout: float, work_timeout: float, staged: bool
) -> Meeting:
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
    return Meeting.outside(
        home, device=device, timeout=timeout, work_timeout=work_timeout, staged=staged
    )


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
