"""Rank 0 lets newcomers in, asks a resource manager for more, and gives ranks back.

Actions and faults of the resource manager become events. None of them stops the run.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from weakref import finalize, ref

from dynmo.change_events import ReleaseEvent
from dynmo.elastic.launch import FolderStore, LauncherManager, Store
from dynmo.elastic.manager import RankPlace, count_text, own_node
from dynmo.elastic.managers import make_manager
from dynmo.elastic.newcomer import MOST, genuine, newcomer_from
from dynmo.errors import ConfigError, RunError
from dynmo.events import Event, FaultEvent
from dynmo.models.identity import Identity, first_of
from dynmo.plan.options import Elastic
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.comm.signed_store import Forged
from dynmo.runtime.comm.store import LOST, no_answer
from dynmo.runtime.comm.waits import call_with_limit, reason

# Seconds between two looks for newcomers, of the run and of its thread.
_LOOK, _READ = 0.25, 0.1
# Most newcomers that the thread takes in one look.
_MOST_IN_A_LOOK = 50
# Seconds without a sign of life until a newcomer is gone, and most between two of rank 0.
_GONE, _PULSE = 10.0, 1.0
# Seconds for a message of rank 0.
_SLACK = 2.0


@dataclass
class _Waiting:
    """A newcomer that waits.

    Attributes:
        text: Its own description.
        seen: Time of the look at which its sign of life last changed.
        beat: Its last sign of life.
        place: Where it runs, once it may join.
    """

    text: str
    seen: float
    beat: bytes = b""
    place: RankPlace | None = None


@dataclass(frozen=True)
class Handover:
    """What the next rank 0 must know of the one that leaves.

    Attributes:
        known: The highest ticket so far.
        expected: Tickets that were neither let in nor refused.
        outstanding: Started ranks that have not come.
        late: Seconds since they were asked for.
        missed: Whether an event said that they are late.
        counts: Messages with the launcher so far (`LauncherManager.counts`).
    """

    known: int = 0
    expected: Sequence[int] = ()
    outstanding: int = 0
    late: float = 0.0
    missed: bool = False
    counts: Sequence[int] = (0, 0)


class Newcomers:
    """The entrance of a run, on rank 0.

    A thread looks in the store for newcomers, and gives signs of life while somebody waits. So
    neither a long step nor a damaged store holds up the other side.

    Args:
        elastic: Options of the run.
        identity: What decides the numbers of the run. A newcomer that differs is refused.
        former: What the rank 0 before has told. None at the start of a run.

    Raises:
        ConfigError: A requirement of `elastic.releaser` is missing at the start of a run.
    """

    def __init__(
        self, elastic: Elastic, world: Meeting, identity: Identity, former: Handover | None = None
    ) -> None:
        assert world.home is not None, "ranks of a program's own process groups stay"
        handover = former or Handover()
        self._events: list[partial[Event]] = []  # they lack the step
        self._launcher = _launcher(world.home, *handover.counts)
        self._manager = None
        try:
            self._manager = make_manager(elastic, self._launcher)
        except ConfigError as error:
            if former is None:
                raise
            self._fault(f"{own_node()}, where rank 0 is now, cannot give ranks back: {error}")
        self._identity, self._join_timeout = identity, elastic.join_timeout
        self._store, self._timeout = world.home.within("join"), world.usual_timeout
        # A wait of a TCPStore holds up its other calls, so the thread has a connection of its own.
        self._watched = world.home.clone().within("join")
        # The highest ticket so far, and the tickets whose holders have not described themselves.
        self._known = handover.known
        self._expected = {*handover.expected}
        self._answered = set[int]()  # tickets that a rank 0 before has answered
        # The thread adds newcomers, and only the other methods remove them.
        self._waiting: dict[int, _Waiting] = {}
        self._pulsed = -_PULSE
        self._pause = min(_PULSE, self._timeout / 4)
        self._read_at = time.monotonic()
        self._failure = ""
        self._forged = ""
        self._reported = set[str]()
        self._looked = 0.0
        self._present: list[int] = []  # tickets of those that may join
        # Started ranks that have not come, the time of the call, and whether an event said so.
        self._outstanding = handover.outstanding
        self._asked = time.monotonic() - handover.late
        self._missed = handover.missed
        self._closed = threading.Event()
        thread = threading.Thread(target=self._watch, args=(ref(self), self._closed), daemon=True)
        thread.start()
        finalize(self, _end, self._closed, thread)  # Python must not end while it is in the store

    @staticmethod
    def _watch(found: Callable[[], Newcomers | None], closed: threading.Event) -> None:
        """Ends with the run, or once a loop has dropped its pipeline."""
        while not closed.wait(_READ) and (newcomers := found()) is not None:
            try:
                newcomers._read()
            except LOST as error:
                newcomers._failure = reason(error) or type(error).__name__
                return
            del newcomers

    def _read(self) -> None:
        now = time.monotonic()
        # A store in a file grows with every write, so nothing is written while nobody waits.
        for ticket in range(self._known + 1, min(self._known + _MOST_IN_A_LOOK, MOST) + 1):
            try:
                if self._watched.find(f"ticket/{ticket}") is None:
                    break
                self._expected.add(ticket)
            except Forged as error:
                self._forged = self._forged or f"{error}; it is ignored"
            self._known = ticket
        self._expected -= self._answered
        for ticket in sorted(self._expected):
            text = genuine(self._watched, f"here/{ticket}")
            if text is not None:
                self._waiting[ticket] = _Waiting(text.decode(errors="replace"), now)
                self._expected.remove(ticket)
        waiting = list(self._waiting.items())
        for ticket, each in waiting:
            beat = genuine(self._watched, f"beat/{ticket}")
            if beat is not None and beat != each.beat:
                each.beat, each.seen = beat, now
        if waiting and now - self._pulsed > self._pause:
            self._pulsed = now
            self._watched.set("pulse", str(now))
        self._read_at = now

    @property
    def waiting(self) -> int:
        """Number of newcomers at the last look."""
        return len(self._present)

    def look(self, at_once: bool = False) -> int:
        """Returns the number of waiting newcomers. Looks at once, or every `_LOOK` seconds."""
        moment = time.monotonic()
        if at_once or moment - self._looked >= _LOOK:
            self._looked = moment
            for ticket, each in list(self._waiting.items()):
                if self._read_at - each.seen > _GONE:
                    del self._waiting[ticket]
                    if each.place is not None:
                        self._fault(f"{each.place} waited to join and is gone")
            waiting = sorted(self._waiting.items())
            self._present = [ticket for ticket, each in waiting if self._accepts(ticket, each)]
            why = self._failure
            if moment - self._read_at > self._timeout:
                why = why or f"it has not answered for {self._timeout:g} s"
            failure = why and f"nobody can join: the store of the run cannot be read ({why})"
            for problem in {self._forged, failure} - self._reported - {""}:
                self._reported.add(problem)
                self._fault(problem)
            self._watch_manager()
        return len(self._present)

    def _accepts(self, ticket: int, newcomer: _Waiting) -> bool:
        """Refuses a newcomer that would compute other numbers."""
        if newcomer.place is not None:
            return True
        name = f"newcomer {ticket}"
        try:
            place, identity = newcomer_from(newcomer.text)
            name, differences = str(place), identity.differences(self._identity)
            if not differences:
                newcomer.place = place
                return True
            why = f"it differs from the run in {first_of(differences)}"
        except RunError as error:
            why = str(error)
        del self._waiting[ticket]
        advice = "start it with the code, torch and dynmo that the run was started with"
        self._send(f"refused/{ticket}", f"the run refused this process: {why}; {advice}")
        self._fault(f"{name} wanted to join and was refused: {why}")
        return False

    def let_in(self, messages: Sequence[str]) -> list[RankPlace]:
        """Sends a message to each of the first waiting newcomers. Returns where these run."""
        count = len(messages)
        tickets, self._present = self._present[:count], self._present[count:]
        self._outstanding = max(0, self._outstanding - count)
        newcomers = [self._waiting.pop(ticket) for ticket in tickets]
        for ticket, message in zip(tickets, messages, strict=True):
            self._send(f"state/{ticket}", message)
        return [each.place for each in newcomers if each.place is not None]

    def _send(self, key: str, text: str) -> None:
        try:
            call_with_limit(_SLACK, lambda: self._store.set(key, text))
        except TimeoutError:
            raise no_answer(_SLACK) from None

    def start(self, count: int) -> None:
        """Starts ranks beside the waiting newcomers, unless they are on their way."""
        on_their_way = max(0, self._outstanding - self.waiting)
        if self._manager is None or not self._manager.can_start or count <= on_their_way:
            return
        self._manager.start(count - on_their_way)
        self._outstanding += count - on_their_way
        self._asked, self._missed = time.monotonic(), False

    def miss(self) -> None:
        """Notes that the run has reported the missing ranks itself."""
        self._missed = True

    def on_resize(self, ranks: Sequence[RankPlace], left: Sequence[RankPlace] = ()) -> None:
        """Tells the launcher which processes are ranks now, and gives those that left back."""
        if self._launcher is not None:
            self._launcher.ranks_are(ranks)
        if self._manager is not None and left:
            self._manager.give_back(left, ranks)

    def take_events(self, step: int) -> list[Event]:
        """Returns the events since the last call, with the number of the next step."""
        missing, late = self._outstanding - len(self._present), time.monotonic() - self._asked
        if missing > 0 and not self._missed and late > self._join_timeout:
            self._missed = True
            assert self._manager is not None
            asked = f"{self._manager.name} was asked for {count_text(missing)} {late:.0f} s ago"
            goes_on = "the run goes on without them until they come"
            self._fault(f"{asked}, and none has come; {goes_on}")
        events, self._events = self._events, []
        return [event(step) for event in events]

    def handover(self) -> Handover:
        """Returns what the next rank 0 must know, if this one leaves."""
        late, counts = time.monotonic() - self._asked, (0, 0)
        if self._launcher is not None:
            counts = self._launcher.counts
        # In this order the thread can add tickets meanwhile, and none gets lost.
        known, expected = self._known, [*self._expected]
        expected += self._waiting
        return Handover(known, expected, self._outstanding, late, self._missed, counts)

    def go_on(self) -> None:
        """Goes on for a rank 0 that is gone. It has answered the newcomers so far."""
        if self._launcher is not None:
            self._launcher.find_counts()
        for ticket in range(1, MOST):
            with contextlib.suppress(Forged):
                if self._store.find(f"ticket/{ticket}") is None:
                    return
                answers = (self._store.find(f"{kind}/{ticket}") for kind in ("state", "refused"))
                if any(answers):
                    self._answered.add(ticket)
                    self._waiting.pop(ticket, None)  # the thread was faster

    def close(self, left: bool = False) -> None:
        """Ends the entrance. If rank 0 has `left`, the manager may finish what it does."""
        # The store may be gone if a run fails. The run's own failure must be reported then.
        self._closed.set()
        with contextlib.suppress(RuntimeError):
            if not left:
                self._send("over", "1")
        if self._manager is not None:
            self._manager.close(*[self._join_timeout] * left)

    def _watch_manager(self) -> None:
        if self._manager is None:
            return
        for report in self._manager.watch():
            if report.kind == "failed":
                self._outstanding = max(0, self._outstanding - report.ranks)
                self._fault(report.what)
                continue
            fields = {"what": report.what, "ranks": report.ranks, "seconds": report.seconds}
            self._events.append(partial(ReleaseEvent, by=self._manager.name, **fields))

    def _fault(self, what: str) -> None:
        self._events.append(partial(FaultEvent, what=what))


def _launcher(home: Store, asked: int, told: int) -> LauncherManager | None:
    """Returns the launcher of dynmo's that started this process, if one did."""
    folder = os.environ.get("DYNMO_RENDEZVOUS")
    if folder is None:
        return None
    shares = "DYNMO_RENDEZVOUS_FILE" in os.environ
    return LauncherManager(home if shares else FolderStore(Path(folder)), asked, told)


def _end(closed: threading.Event, thread: threading.Thread) -> None:
    closed.set()
    if thread is not threading.current_thread():
        thread.join(timeout=2.0)
