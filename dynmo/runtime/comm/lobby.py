"""The place where processes wait that want to become ranks of a run.

    newcomer   announce: "host a, pid 7"   beat .. beat .. beat ..          summoned: rank 2 of 4
    rank 0                                 present(): who is there, alive   summon(...)

Both sides meet in the store of the run. Rank 0 looks between two steps. A newcomer waits until the
run needs it, or is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from dynmo.errors import ConfigError, RankDied, WaitTimeout
from dynmo.runtime.comm.messages import reason

# Seconds between two signs of life of a newcomer, and seconds without one after which it is gone.
_BEAT, _GONE = 1.0, 10.0
# Seconds between two signs of life of rank 0.
_PULSE = 5.0
# Seconds between two looks of a newcomer for its summons.
_POLL = 0.05
# Seconds that a newcomer gives rank 0 beyond the limit of the run's waits. Rank 0 may be in a step,
# an evaluation or a checkpoint.
_GRACE = 120.0


@dataclass
class _Guest:
    """A newcomer as rank 0 knows it.

    Attributes:
        text: Its own description.
        beat: Its last sign of life.
        seen: Time at which its sign of life last changed.
    """

    text: str
    beat: bytes = b""
    seen: float = field(default_factory=time.monotonic)


class Lobby:
    """Rank 0's side.

    Args:
        home: The store of the run (`World.home`).
    """

    def __init__(self, home: dist.Store) -> None:
        self._store = dist.PrefixStore("lobby", home)
        # The highest ticket so far, and the tickets whose holders have not described themselves.
        self._known, self._expected = 0, set[int]()
        self._guests: dict[int, _Guest] = {}
        self._pulse, self._pulsed = 0, -_PULSE
        self._gone: list[int] = []

    def present(self) -> list[int]:
        """Returns the tickets of all that wait and are alive, first come first."""
        now = time.monotonic()
        # A store in a file grows with every write, so nothing is written while nobody waits.
        tickets = int(self._store.get("tickets")) if self._store.check(["tickets"]) else 0
        self._expected |= set(range(self._known + 1, tickets + 1))
        self._known = tickets
        for ticket in sorted(self._expected):
            if self._store.check([f"here/{ticket}"]):
                self._expected.remove(ticket)
                self._guests[ticket] = _Guest(self._store.get(f"here/{ticket}").decode())
        for ticket, guest in list(self._guests.items()):
            beat = self._store.get(f"beat/{ticket}")
            if beat != guest.beat:
                guest.beat, guest.seen = beat, now
            elif now - guest.seen > _GONE:
                del self._guests[ticket]
                self._gone.append(ticket)
        if self._guests and now - self._pulsed > _PULSE:
            self._pulse, self._pulsed = self._pulse + 1, now
            self._store.set("pulse", str(self._pulse))
        return sorted(self._guests)

    def take_gone(self) -> list[int]:
        """Returns the tickets of newcomers that went away since the last call."""
        gone, self._gone = self._gone, []
        return gone

    def text(self, ticket: int) -> str:
        """Returns a newcomer's description of itself."""
        return self._guests[ticket].text

    def summon(self, tickets: Sequence[int], texts: Sequence[str]) -> None:
        """Calls newcomers into the run.

        Args:
            tickets: Newcomers that are called.
            texts: Message for each of them.
        """
        for ticket, text in zip(tickets, texts, strict=True):
            del self._guests[ticket]
            self._store.set(f"summons/{ticket}", text)

    def refuse(self, ticket: int, why: str) -> None:
        """Sends a newcomer away.

        Args:
            ticket: The newcomer.
            why: What is wrong with it.
        """
        del self._guests[ticket]
        self._store.set(f"refused/{ticket}", why)

    def close(self) -> None:
        """Tells all that wait that the run is over."""
        self._store.set("over", "1")


class Newcomer:
    """A process that waits. It may announce itself again after it was a rank.

    Args:
        home: The store of the run.
        text: Its description of itself.
        timeout: Limit of the run's waits, in seconds.
        name: Its name in messages.
    """

    def __init__(
        self, home: dist.Store, text: str, timeout: float, name: str = "a newcomer"
    ) -> None:
        self._store = dist.PrefixStore("lobby", home)
        self._text, self._timeout, self._name = text, timeout, name

    def wait(self, stopping: Callable[[], bool] = lambda: False) -> str | None:
        """Announces this process and waits until it is called.

        Args:
            stopping: Returns whether this process shall end.

        Returns:
            The message of rank 0. None if the run is over, or this process shall end.

        Raises:
            ConfigError: Rank 0 has refused it.
            RankDied: The store of the run is gone.
            WaitTimeout: Rank 0 gives no sign of life.
        """
        with _told():
            ticket = self._store.add("tickets", 1)
            self._store.set(f"beat/{ticket}", "0")
            self._store.set(f"here/{ticket}", self._text)
            return self._wait(ticket, stopping)

    def _wait(self, ticket: int, stopping: Callable[[], bool]) -> str | None:
        beats, next_beat = 0, 0.0
        pulse, heard, limit = b"", time.monotonic(), self._timeout + _GRACE
        while True:
            if self._store.check([f"summons/{ticket}"]):
                return self._store.get(f"summons/{ticket}").decode()
            if self._store.check([f"refused/{ticket}"]):
                raise ConfigError(self._store.get(f"refused/{ticket}").decode())
            if stopping() or self._store.check(["over"]):
                return None
            now = time.monotonic()
            if now >= next_beat:
                beats, next_beat = beats + 1, now + _BEAT
                self._store.set(f"beat/{ticket}", str(beats))
                new = self._store.get("pulse") if self._store.check(["pulse"]) else b""
                if new != pulse:
                    pulse, heard = new, now
                elif now - heard > limit:
                    raise WaitTimeout(
                        f"{self._name} waited {limit:g} s for rank 0, which gives no sign of life",
                        [0],
                    )
            time.sleep(_POLL)


@contextmanager
def _told() -> Iterator[None]:
    """Turns a lost store into an error of one line."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, RankDied | WaitTimeout):
            raise
        raise RankDied(
            f"lost the store of rank 0 while waiting to join ({reason(error)}); the run has ended"
        ) from None


def tell_all(store: dist.Store, key: str, rank: int, text: str) -> None:
    """Leaves a text of this rank for the others.

    Args:
        store: Store of this generation.
        key: Name under which the ranks leave their texts.
        rank: This rank.
        text: Its text.
    """
    store.set(f"{key}/{rank}", text)


def read_all(store: dist.Store, key: str, size: int, timeout: float) -> list[str]:
    """Returns the texts of all ranks, in order.

    Args:
        store: Store of this generation.
        key: As in `tell_all`.
        size: Number of ranks.
        timeout: Seconds to wait for a text that is not there yet.

    Raises:
        WaitTimeout: A rank left none.
    """
    keys = [f"{key}/{rank}" for rank in range(size)]
    try:
        store.wait(keys, timedelta(seconds=timeout))
    except RuntimeError:
        absent = [rank for rank, each in enumerate(keys) if not store.check([each])]
        raise WaitTimeout(
            f"waited {timeout:g} s for ranks {absent} to say where they run", absent
        ) from None
    return [store.get(each).decode() for each in keys]
