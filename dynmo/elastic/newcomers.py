"""Rank 0 lets newcomers in, asks a resource manager for more, and gives ranks back.

Actions and faults of the resource manager become events. None of them stops the run.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from dynmo.elastic.join_requests import JoinRequests, newcomer_from
from dynmo.elastic.launch import FolderStore, LauncherManager, Store
from dynmo.elastic.managers import make_manager
from dynmo.elastic.place import RankPlace, count_text
from dynmo.errors import RunError
from dynmo.events import Event, FaultEvent, ReleaseEvent
from dynmo.models.identity import Identity, first_of
from dynmo.plan.options import Elastic
from dynmo.runtime.comm.meeting import Meeting

# Seconds between two looks for newcomers.
_LOOK = 0.25


class Newcomers:
    """The entrance of a run, on rank 0.

    Args:
        elastic: Options of the run.
        identity: What decides the numbers of the run. A newcomer that differs is refused.

    Raises:
        ConfigError: A requirement of `elastic.releaser` is missing.
    """

    def __init__(self, elastic: Elastic, world: Meeting, identity: Identity) -> None:
        assert world.home is not None, "ranks of a program's own process groups stay"
        self._launcher = _launcher(world.home)
        self._manager = make_manager(elastic, self._launcher)
        self._join_requests = JoinRequests(world.home, world.usual_timeout)
        self._identity, self._join_timeout = identity, elastic.join_timeout
        self._looked = 0.0
        # Newcomers that wait, and where each of them runs.
        self._present: list[int] = []
        self._places: dict[int, RankPlace] = {}
        # Started ranks that have not come, the time of the call, and whether an event said so.
        self._outstanding = 0
        self._asked = 0.0
        self._missed = False
        self._events: list[partial[Event]] = []  # they lack the step

    @property
    def waiting(self) -> int:
        """Number of newcomers at the last look."""
        return len(self._present)

    def look(self, at_once: bool = False) -> int:
        """Returns the number of waiting newcomers. Looks at once, or every `_LOOK` seconds."""
        moment = time.monotonic()
        if at_once or moment - self._looked >= _LOOK:
            self._looked = moment
            self._present = [each for each in self._join_requests.present() if self._lets_in(each)]
            for ticket in self._join_requests.take_gone():
                if ticket in self._places:
                    self._fault(f"{self._places.pop(ticket)} waited to join and is gone")
            problem = self._join_requests.take_problem()
            if problem is not None:
                self._fault(problem)
            self._watch_manager()
        return len(self._present)

    def _lets_in(self, ticket: int) -> bool:
        """Refuses a newcomer that would compute other numbers."""
        if ticket in self._places:
            return True
        name = f"newcomer {ticket}"
        try:
            place, identity = newcomer_from(self._join_requests.text(ticket))
            name, differences = str(place), identity.differences(self._identity)
            if not differences:
                self._places[ticket] = place
                return True
            why = f"it differs from the run in {first_of(differences)}"
        except RunError as error:
            why = str(error)
        advice = "start it with the code, torch and dynmo that the run was started with"
        self._join_requests.refuse(ticket, f"the run refused this process: {why}; {advice}")
        self._fault(f"{name} wanted to join and was refused: {why}")
        return False

    def let_in(self, messages: Sequence[str]) -> list[RankPlace]:
        """Sends a message to each of the first waiting newcomers. Returns where these run."""
        tickets = self._present[: len(messages)]
        places = [self._places.pop(ticket) for ticket in tickets]
        self._join_requests.let_in(tickets, messages)
        self._present = self._present[len(messages) :]
        self._outstanding = max(0, self._outstanding - len(messages))
        return places

    def start(self, count: int) -> None:
        """Starts ranks beside the waiting newcomers, unless they are on their way."""
        if self._manager is None or not self._manager.can_start or count <= self._outstanding:
            return
        self._manager.start(count - self._outstanding)
        self._outstanding, self._asked, self._missed = count, time.monotonic(), False

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

    def close(self) -> None:
        # The store may be gone if a run fails. The run's own failure must be reported then.
        with contextlib.suppress(RuntimeError):
            self._join_requests.close()
        if self._manager is not None:
            self._manager.close()

    def _watch_manager(self) -> None:
        if self._manager is None:
            return
        for report in self._manager.watch():
            if report.kind == "failed":
                self._outstanding = max(0, self._outstanding - report.ranks)
                self._fault(report.what)
                continue
            told = {"what": report.what, "ranks": report.ranks, "seconds": report.seconds}
            self._events.append(partial(ReleaseEvent, by=self._manager.name, **told))

    def _fault(self, what: str) -> None:
        self._events.append(partial(FaultEvent, what=what))


def _launcher(home: Store) -> LauncherManager | None:
    """Returns the launcher of dynmo's that started this process, if one did."""
    if "DYNMO_RENDEZVOUS_FILE" in os.environ:
        return LauncherManager(home)
    folder = os.environ.get("DYNMO_RENDEZVOUS")
    return None if folder is None else LauncherManager(FolderStore(Path(folder)))
