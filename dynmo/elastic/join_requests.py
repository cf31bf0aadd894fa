"""Requests of processes that wait to become ranks of a run.

    newcomer   asks: "host a, pid 7"   beat .. beat .. beat ..          granted: rank 2 of 4
    rank 0                             present(): who is there, alive   grant(...)

Both sides meet in the store of the run. A thread of rank 0 looks there, and gives signs of life
while somebody waits. So neither a long step nor a damaged store holds up the other side. A newcomer
waits until the run needs it, or is over.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import TypeVar

from dynmo.elastic.place import RankPlace
from dynmo.errors import ConfigError, DynmoError, RankDied, RunError, WaitTimeout
from dynmo.models.identity import Identity, identity_from
from dynmo.runtime.comm.deadline import call_with_limit
from dynmo.runtime.comm.error_text import reason
from dynmo.runtime.comm.signed_store import Forged, SignedStore
from dynmo.runtime.comm.store import LOST, no_answer

# Most seconds between two signs of life of a newcomer, and seconds without one until it is gone.
_BEAT, _GONE = 1.0, 10.0
# Most seconds between two signs of life of rank 0, and seconds between two looks of it.
_PULSE, _LOOK = 1.0, 0.1
# Seconds between two looks of a newcomer for its grant.
_POLL = 0.05
# Seconds for a message of rank 0.
_SLACK = 2.0
# Most join requests of a run, and most that rank 0 takes in one look.
_MOST, _MOST_IN_A_LOOK = 10_000, 50

Result = TypeVar("Result")


@dataclass
class _Waiting:
    """A newcomer as rank 0 knows it.

    Attributes:
        text: Its own description.
        seen: Time of the look at which its sign of life last changed.
        beat: Its last sign of life.
    """

    text: str
    seen: float
    beat: bytes = b""


class JoinRequests:
    """Rank 0's side: the newcomers that wait."""

    def __init__(self, home: SignedStore, timeout: float) -> None:
        self._store = home.within("join")
        self._timeout = timeout
        # A wait of a TCPStore holds up its other calls, so the thread has a connection of its own.
        self._watched = home.clone().within("join")
        # The highest ticket so far, and the tickets whose holders have not described themselves.
        self._known = 0
        self._expected = set[int]()
        # The thread adds newcomers, and only the other methods remove them.
        self._waiting: dict[int, _Waiting] = {}
        self._pulse = 0
        self._pulsed = -_PULSE
        self._pause = min(_PULSE, timeout / 4)
        self._gone: list[int] = []
        self._looked = time.monotonic()
        self._failure = ""
        self._forged = ""
        self._told = set[str]()
        self._closed = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        try:
            while not self._closed.wait(_LOOK):
                self._look()
        except LOST as error:
            self._failure = reason(error) or type(error).__name__

    def _look(self) -> None:
        now = time.monotonic()
        # A store in a file grows with every write, so nothing is written while nobody waits.
        for ticket in range(self._known + 1, min(self._known + _MOST_IN_A_LOOK, _MOST) + 1):
            try:
                if self._watched.find(f"ticket/{ticket}") is None:
                    break
                self._expected.add(ticket)
            except Forged as error:
                self._forged = self._forged or f"{error}; it is ignored"
            self._known = ticket
        for ticket in sorted(self._expected):
            text = _genuine(self._watched, f"here/{ticket}")
            if text is not None:
                self._expected.remove(ticket)
                self._waiting[ticket] = _Waiting(text.decode(errors="replace"), now)
        waiting = list(self._waiting.items())
        for ticket, each in waiting:
            beat = _genuine(self._watched, f"beat/{ticket}")
            if beat is not None and beat != each.beat:
                each.beat, each.seen = beat, now
        if waiting and now - self._pulsed > self._pause:
            self._pulse, self._pulsed = self._pulse + 1, now
            self._watched.set("pulse", str(self._pulse))
        self._looked = now

    def present(self) -> list[int]:
        """Returns the tickets of all that wait and are alive, first come first."""
        for ticket, each in list(self._waiting.items()):
            if self._looked - each.seen > _GONE:
                del self._waiting[ticket]
                self._gone.append(ticket)
        return sorted(self._waiting)

    def take_problem(self) -> str | None:
        """Returns what is wrong with the store, once. None if nothing is new."""
        late = time.monotonic() - self._looked > self._timeout
        why = self._failure or f"it has not answered for {self._timeout:g} s" * late
        failure = why and f"nobody can join: the store of the run cannot be read ({why})"
        for problem in {self._forged, failure} - self._told - {""}:
            if not self._closed.is_set():
                self._told.add(problem)
                return problem
        return None

    def take_gone(self) -> list[int]:
        """Returns the tickets of newcomers that went away since the last call."""
        gone, self._gone = self._gone, []
        return gone

    def text(self, ticket: int) -> str:
        return self._waiting[ticket].text

    def let_in(self, tickets: Sequence[int], texts: Sequence[str]) -> None:
        for ticket, text in zip(tickets, texts, strict=True):
            del self._waiting[ticket]
            self._send(f"grant/{ticket}", text)

    def refuse(self, ticket: int, why: str) -> None:
        del self._waiting[ticket]
        self._send(f"refused/{ticket}", why)

    def close(self) -> None:
        """Tells all that wait that the run is over."""
        self._closed.set()
        self._send("over", "1")

    def _send(self, key: str, text: str) -> None:
        try:
            call_with_limit(_SLACK, lambda: self._store.set(key, text))
        except TimeoutError:
            raise no_answer(_SLACK) from None


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
        """Asks to join, and waits for the grant. None if the run is over or `stopping` says so."""
        with _told():
            self._heard = time.monotonic()
            ticket = self._ask(self._request)
            return self._wait(ticket, stopping)

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
        ticket = next((each for each in range(1, _MOST) if self._claims(each)), None)
        if ticket is None:
            raise RunError(f"{_MOST} processes have asked to join this run; start it anew")
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
            answer = self._ask(lambda: self._read(f"grant/{ticket}"))
            if answer:
                return answer.decode()
            refused = self._ask(lambda: self._read(f"refused/{ticket}"))
            if refused:
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
        return _genuine(self._store, key) or b""


def _genuine(store: SignedStore, key: str) -> bytes | None:
    """Returns a value that the run has written, or None."""
    with suppress(Forged):
        return store.find(key)
    return None


@contextmanager
def _told() -> Iterator[None]:
    """Turns a lost store into an error of one line."""
    try:
        yield
    except DynmoError:
        raise
    except LOST as error:
        why = reason(error) or type(error).__name__
        raise RankDied(
            f"lost the store of rank 0 while waiting to join ({why}); the run has ended"
        ) from None


def newcomer_text(place: RankPlace, identity: Identity) -> str:
    return json.dumps({"place": asdict(place), "identity": identity.model_dump()})


def newcomer_from(text: str) -> tuple[RankPlace, Identity]:
    """Reads the text of `newcomer_text`."""
    try:
        record = json.loads(text)
        return RankPlace(**record["place"]), identity_from(record["identity"])
    except (ValueError, TypeError, LookupError):
        raise RunError("what it says of itself cannot be read") from None
