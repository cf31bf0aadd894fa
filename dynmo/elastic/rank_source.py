"""Rank 0's source of ranks: the join requests and the resource manager.

Actions and faults of the resource manager become events. None of them stops the run.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from dynmo.elastic.join_requests import JoinRequests, join_request_from
from dynmo.elastic.manager import Manager
from dynmo.elastic.managers.choose import make_manager
from dynmo.elastic.member import Member, count_text, describe
from dynmo.errors import RunError
from dynmo.events import Event, FaultEvent, ReleaseEvent
from dynmo.models.identity import Identity, first_of
from dynmo.plan.options import Elastic
from dynmo.runtime.comm.world import World

# Seconds between two looks for join requests.
_LOOK = 0.25


class RankSource:
    """Requests ranks, lets them join and releases them, on rank 0.

    Args:
        join_requests: Holds the waiting newcomers.
        manager: The resource manager, if there is one.
        identity: What decides the numbers of the run. A newcomer that differs is refused.
        join_timeout: Seconds after which requested ranks count as missing.
    """

    def __init__(
        self,
        join_requests: JoinRequests,
        manager: Manager | None,
        identity: Identity,
        join_timeout: float,
    ) -> None:
        self._join_requests = join_requests
        self._manager = manager
        self._identity = identity
        self._join_timeout = join_timeout
        self._looked = 0.0
        # Newcomers that wait, and where each of them runs.
        self._present: list[int] = []
        self._members: dict[int, Member] = {}
        # Requested ranks that have not come, the time of the request, and whether an event said so.
        self._outstanding = 0
        self._asked = 0.0
        self._missed = False
        self._events: list[Event] = []

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
            self._events += [
                self._fault(f"{describe(self._members.pop(ticket))} waited to join and is gone")
                for ticket in self._join_requests.take_gone()
                if ticket in self._members
            ]
            problem = self._join_requests.take_problem()
            self._events += [] if problem is None else [self._fault(problem)]
            self._read_reports()
        return len(self._present)

    def _lets_in(self, ticket: int) -> bool:
        """Refuses a newcomer that would compute other numbers."""
        if ticket in self._members:
            return True
        name = f"newcomer {ticket}"
        try:
            member, identity = join_request_from(self._join_requests.text(ticket))
            name, differences = describe(member), identity.differences(self._identity)
            if not differences:
                self._members[ticket] = member
                return True
            why = f"it differs from the run in {first_of(differences)}"
        except RunError as error:
            why = str(error)
        advice = "start it with the code, torch and dynmo that the run was started with"
        self._join_requests.refuse(ticket, f"the run refused this process: {why}; {advice}")
        self._events.append(self._fault(f"{name} wanted to join and was refused: {why}"))
        return False

    def grant(self, texts: Sequence[str]) -> list[Member]:
        """Sends a grant to each of the first waiting newcomers, and returns these."""
        tickets = self._present[: len(texts)]
        members = [self._members.pop(ticket) for ticket in tickets]
        self._join_requests.grant(tickets, texts)
        self._present = self._present[len(texts) :]
        self._outstanding = max(0, self._outstanding - len(texts))
        return members

    def request(self, count: int) -> None:
        """Requests ranks beside the waiting newcomers, unless they are on their way."""
        if self._manager is None or not self._manager.can_request or count <= self._outstanding:
            return
        self._manager.request(count - self._outstanding)
        self._outstanding, self._asked, self._missed = count, time.monotonic(), False

    def miss(self) -> None:
        """Notes that the run has reported the missing ranks itself."""
        self._missed = True

    def release(self, left: Sequence[Member], stay: Sequence[Member]) -> None:
        if self._manager is not None:
            self._manager.release(left, stay)

    def take_events(self, step: int) -> list[Event]:
        """Returns the events since the last call, with the number of the next step."""
        late = time.monotonic() - self._asked
        if (
            self._outstanding > len(self._present)
            and not self._missed
            and late > self._join_timeout
        ):
            self._missed = True
            assert self._manager is not None
            count = self._outstanding - len(self._present)
            asked = (
                f"{self._manager.name} was asked for {count_text(count)} {late:.0f} s ago, and "
                "none has come"
            )
            self._events.append(
                self._fault(f"{asked}; the run goes on without them until they come")
            )
        events, self._events = self._events, []
        return [type(event)(**{**vars(event), "step": step}) for event in events]

    def close(self) -> None:
        # The store may be gone if a run fails. The run's own failure must be reported then.
        with contextlib.suppress(RuntimeError):
            self._join_requests.close()
        if self._manager is not None:
            self._manager.close()

    def _read_reports(self) -> None:
        if self._manager is None:
            return
        for report in self._manager.reports():
            if report.kind == "failed":
                self._outstanding = max(0, self._outstanding - report.ranks)
                self._events.append(self._fault(report.what))
            else:
                self._events.append(
                    ReleaseEvent(-1, self._manager.name, report.what, report.ranks, report.seconds)
                )

    def _fault(self, what: str) -> FaultEvent:
        return FaultEvent(-1, what)


def make_source(elastic: Elastic, world: World, identity: Identity) -> RankSource | None:
    """Makes rank 0's source of ranks.

    Returns:
        The source. None on other ranks, and in a world whose ranks cannot change.

    Raises:
        ConfigError: A requirement of `elastic.releaser` is missing.
    """
    if world.rank or world.home is None:
        return None
    manager = make_manager(elastic)
    join_requests = JoinRequests(world.home, world.usual_timeout)
    return RankSource(join_requests, manager, identity, elastic.join_timeout)
