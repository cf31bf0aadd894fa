"""Slow is not dead: a thread of each rank tells the store that it lives, and what it does.

    rank 0   waits for rank 1 ......................... "rank 1 lives and works": goes on waiting
    rank 1   reads its data (tokenises its text, 41 %)  tells so every few seconds
    store    heartbeat/1 = number, section, seconds since the last progress, ranks it waits for

gloo ends all connections of a rank once one of its waits has passed its limit. So waits have no
limit there. This thread looks at those that have lasted for over `parallel.timeout`:

    a rank has not spoken for `parallel.timeout`            it is dead
    a rank works, without progress for `work_timeout`       it hangs
    a rank waits for others for `parallel.timeout`          these are looked at in its place
    all of them wait for one another                        nobody will come

In all other cases the wait goes on. Otherwise the thread keeps the verdict, and ends the process
groups of all waits. A dead process is found without this: its connections end. gloo does not end
every collective whose connection was cut. A rank that cannot leave its wait ends as a process.

No clock of another machine counts. A rank speaks if the number in the store grows.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar

import torch

from dynmo.activity import ACTIVITY
from dynmo.errors import DynmoError
from dynmo.runtime.comm.headers import TAG_END
from dynmo.runtime.comm.signed_store import SignedStore
from dynmo.runtime.comm.waits import call_with_limit

_logger = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")

# Most seconds between two beats, and the share of `parallel.timeout` if that is less.
EVERY, SHARE = 10.0, 1 / 8
# The same if the others go on without a dead rank.
QUICK = 0.25
# Seconds in which the store must answer.
_ANSWER = 2.0
# Seconds that a rank gets to leave a wait that is over, if others go on without it. Else it has at
# least `parallel.timeout`, too.
_LEAVE = 5.0
# Key of the store by which a rank tells that its generation cannot go on.
ENDED = "ended"
# In the environment of a rank: nobody takes it for dead, and it waits without a limit.
DEBUGGER = "DYNMO_DEBUGGER"


class Ranks(Protocol):
    """What this module needs of a `RankGroup`."""

    rank: int
    size: int
    timeout: float

    def global_rank(self, rank: int) -> int: ...

    def describe_rank(self, rank: int) -> str: ...

    def fail(
        self, error: RuntimeError, peers: Sequence[int] | None, what: str, wait: Wait | None
    ) -> NoReturn: ...


class Wait:
    """A wait of this rank for others, while it lasts.

    Args:
        heartbeat: That of this rank. None: only `is_over` has a limit.
        world: The ranks among which `peers` count. None means all others.
        what: What is waited for, for messages.
        group: The process group that is ended if nobody comes. None: the wait asks `is_over`.
    """

    __slots__ = ("_heartbeat", "_peers", "begun", "group", "said", "thread", "what", "world")

    def __init__(
        self,
        heartbeat: Heartbeat | None,
        world: Ranks,
        peers: Sequence[int] | None,
        what: str,
        group: Any = None,
    ) -> None:
        self._heartbeat, self.world, self._peers = heartbeat, world, peers
        self.what, self.group = what, group
        self.thread, self.begun = threading.get_ident(), time.monotonic()
        # Seconds of the wait at which it was last said that it goes on.
        self.said = 0.0

    def __enter__(self) -> Wait:
        if self._heartbeat is not None:
            self._heartbeat.begin(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        if kind is None:
            if self._heartbeat is not None:
                self._heartbeat.end(self)
            return
        try:
            if isinstance(error, RuntimeError) and not isinstance(error, DynmoError):
                self.world.fail(error, self._peers, self.what, self)
        finally:
            if self._heartbeat is not None:
                self._heartbeat.end(self)

    @property
    def is_over(self) -> bool:
        """Whether nobody will come."""
        if self._heartbeat is None:
            return time.monotonic() - self.begun >= self.world.timeout + 5
        return self._heartbeat.verdict is not None

    @property
    def ranks(self) -> list[int]:
        """The global ranks that are waited for."""
        own, peers = self.world.rank, self._peers
        peers = [peer for peer in range(self.world.size) if peer != own] if peers is None else peers
        return [self.world.global_rank(peer) for peer in peers]


class Verdict(NamedTuple):
    """Why the waits of a rank have ended.

    Attributes:
        wait: The first that could not end well.
        ranks: The global ranks that keep it waiting. Empty if all wait for one another.
        seconds: How long it has lasted.
        key: The option of its limit. None: that of the wait. `ENDED`: another rank has ended it.
        said: What these ranks have told last.
    """

    wait: Wait
    ranks: list[int]
    seconds: float
    key: str | None
    said: str


@dataclass
class Heard:
    """What a rank has told last.

    Attributes:
        at: When this rank has heard it, by its own clock.
        number: Grows with each beat. 0: nothing was heard yet.
        does: What the rank does.
        idle: Seconds since its last progress.
        waits: The ranks for which it waits. Empty: it works.
        every: Seconds until its next beat.
        is_patient: Whether nobody is to take it for dead.
    """

    at: float
    number: int = 0
    does: str = ""
    idle: float = 0.0
    waits: list[int] = field(default_factory=list[int])
    every: float = 0.0
    is_patient: bool = False


class Heartbeat:
    """The thread of a rank that tells what it does, and looks at its waits.

    Args:
        world: All ranks of a generation.
        store: Their store. The thread uses a connection of its own.
        usual_timeout: Limit of waits after the set-up.
        work_timeout: Limit of work without progress.

    Attributes:
        verdict: Why no wait of this rank will end well. None: they may.
        is_quick: Whether it looks often, and ends all waits once a rank has told the end of the
            generation.
        lost: Tells which rank has ended. Empty if none has.
        abort: Ends what waits on a device. None: nothing does.
    """

    def __init__(
        self, world: Ranks, store: SignedStore, usual_timeout: float, work_timeout: float
    ) -> None:
        self.is_quick = False
        self.lost: Callable[[], str] | None = None
        self.abort: Callable[[], None] | None = None
        self._world, self._home, self._work_timeout = world, store, work_timeout
        self._usual_timeout = usual_timeout
        self._store: SignedStore | None = None
        self._waits: dict[int, Wait] = {}
        self._heard: dict[int, Heard] = {}
        self._thread_of_rank = threading.get_ident()
        self._is_patient = os.environ.get(DEBUGGER, "0") not in ("", "0")
        self._number, self._ticks, self._progress = 0, ACTIVITY.ticks, time.monotonic()
        self._over = threading.Event()
        self.verdict: Verdict | None = None
        # When the thread has acted on the verdict first.
        self._judged = 0.0
        self._thread = threading.Thread(target=self._serve, name="heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join(timeout=2 * _ANSWER)

    def begin(self, wait: Wait) -> None:
        ACTIVITY.ticks += 1
        self._waits[id(wait)] = wait

    def end(self, wait: Wait) -> None:
        self._waits.pop(id(wait), None)
        ACTIVITY.ticks += 1

    @property
    def _open_waits(self) -> list[Wait]:
        return list(self._waits.values())

    @property
    def is_waiting(self) -> bool:
        """Whether the rank's own thread waits for others."""
        return any(wait.thread == self._thread_of_rank for wait in self._open_waits)

    # -- the thread --------------------------------------------------------------------------------

    @property
    def _every(self) -> float:
        """Seconds until the next beat. A test may change the limit of a wait."""
        limits = [wait.world.timeout for wait in self._open_waits]
        most = QUICK if self.is_quick else EVERY
        return min(most, SHARE * min(self._world.timeout, self._usual_timeout, *limits))

    def _serve(self) -> None:
        last = time.monotonic()
        while not self._over.wait(every := self._every):
            now = time.monotonic()
            if now - last > 4 * every:  # this process stood still, and so may the others have done
                for heard in self._heard.values():
                    heard.at = now
                self._judged = now
            last = now
            try:
                self._tell(every)
                self._look(every)
                if self.is_quick:
                    self._look_for_end()
                self._end_process()
            except Exception as error:  # nothing else ends the waits
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        for wait in self._open_waits:
            seconds = time.monotonic() - wait.begun
            if seconds >= wait.world.timeout and self.verdict is None:
                said = f"this rank cannot look at others ({type(error).__name__}: {error})"
                self.verdict = Verdict(wait, wait.ranks, seconds, None, said)
                self._end_waits()

    def _ask(self, call: Callable[[], _Answer]) -> _Answer | None:
        """Returns the store's answer. None if there is none: its server is gone, or hangs."""
        with suppress(RuntimeError, TimeoutError):
            return call_with_limit(_ANSWER, call)
        return None

    def _tell(self, every: float) -> None:
        """Says in the store that this rank lives."""
        now = time.monotonic()
        waits = [wait for wait in self._open_waits if wait.thread == self._thread_of_rank]
        if self._ticks != ACTIVITY.ticks:
            self._ticks, self._progress = ACTIVITY.ticks, now
        self._number += 1
        does = [ACTIVITY.text, f"waits for {waits[0].what}" if waits else ""]
        told = {
            "number": self._number,
            "does": " and ".join(filter(None, does)),
            "idle": round(now - self._progress, 2),
            "waits": waits[0].ranks if waits else [],
            "every": every,
            "is_patient": self._is_patient,
        }

        def write() -> None:
            # The rank's own connection is taken while it waits for a key.
            self._store = self._store or self._home.clone()
            self._store.set(f"heartbeat/{self._world.rank}", json.dumps(told))

        self._ask(write)

    def _hear(self, ranks: Sequence[int]) -> None:
        """Reads what ranks have told."""
        store = self._store

        def read() -> list[bytes | None]:
            return [store and store.find(f"heartbeat/{rank}") for rank in ranks]

        texts, now = self._ask(read) or [None] * len(ranks), time.monotonic()
        for rank, text in zip(ranks, texts, strict=True):
            before = self._heard.setdefault(rank, Heard(now))
            with suppress(ValueError, TypeError):  # no rank has written it
                heard = before if text is None else Heard(now, **json.loads(text))
                if heard.number != before.number:
                    self._heard[rank] = heard

    def _look(self, every: float) -> None:
        """Looks at the ranks for which this one waits."""
        now = time.monotonic()
        # A silence shows only if the rank was heard before.
        waits = [wait for wait in self._open_waits if now - wait.begun >= every]
        if waits:
            self._hear(sorted({rank for wait in waits for rank in wait.ranks}))
        for wait in waits:
            late = time.monotonic() - wait.begun >= wait.world.timeout
            if late and not self._is_patient and self.verdict is None:
                self._judge(wait)
        if self.verdict is not None:
            self._end_waits()

    def _look_for_end(self) -> None:
        """Ends the waits of this rank if another one has told the end of the generation."""
        if self.verdict is None and (waits := self._open_waits):
            store = self._store
            said = (self._ask(lambda: store and store.find(ENDED)) or b"").decode()
            if self.lost is not None and not said:
                said = self._ask(self.lost)
            if said:
                seconds = time.monotonic() - waits[0].begun
                self.verdict = Verdict(waits[0], [], seconds, ENDED, said)
                self._end_waits()
                if self.abort is not None:
                    self.abort()

    # -- the verdict -------------------------------------------------------------------------------

    def _awaited(self, ranks: Sequence[int], limit: float) -> tuple[list[int], set[int]]:
        """Follows ranks that were heard and have waited for `limit` to those for which they wait.

        Returns:
            The ranks at the end of the chain, and all that were looked at.
        """
        ends, seen, found = list[int](), {self._world.rank}, list(ranks)
        while found:
            seen.update(found)
            further = set[int]()
            for rank in found:
                heard = self._heard[rank]
                if heard.waits and heard.idle >= limit and not self._is_silent(rank):
                    further.update(heard.waits)
                else:
                    ends.append(rank)
            found = sorted(further - seen)
            self._hear(found)
        return ends, seen - {self._world.rank}

    def _silence(self, rank: int) -> float:
        return time.monotonic() - self._heard[rank].at

    def _is_silent(self, rank: int) -> bool:
        return self._silence(rank) >= self._world.timeout and self._missed(rank)

    def _missed(self, rank: int) -> bool:
        """Whether several beats of a rank are missing."""
        return self._silence(rank) >= 4 * self._heard[rank].every

    def _judge(self, wait: Wait) -> None:
        """Decides on a wait that has passed its limit."""
        longest = max(wait.world.timeout, self._work_timeout)
        ends, seen = self._awaited(wait.ranks, wait.world.timeout)
        last = [rank for rank in ends if not self._heard[rank].is_patient]
        dead = [rank for rank in last if self._is_silent(rank)]
        stuck = [
            rank
            for rank in last
            if not self._heard[rank].waits and self._heard[rank].idle >= longest
        ]
        seconds = time.monotonic() - wait.begun
        if ends and not dead and not stuck:
            # The first of the ranks that wait says it for all.
            is_first = not any(rank < self._world.rank for rank in seen if self._heard[rank].waits)
            may_be_dead = any(self._missed(rank) for rank in last)
            if is_first and not may_be_dead and seconds - wait.said >= wait.world.timeout:
                wait.said = seconds
                me, said = self._world.describe_rank(self._world.rank), self.describe(ends)
                _logger.warning(f"{me} has waited {seconds:.0f} s for {wait.what}; {said}")
            return
        key = "work_timeout" if stuck and not dead and longest > wait.world.timeout else None
        blamed = dead or stuck
        self.verdict = Verdict(wait, blamed, seconds, key, self.describe(blamed or wait.ranks))

    def _end_waits(self) -> None:
        groups = {id(wait.group): wait.group for wait in self._open_waits}
        for group in groups.values():
            if group is not None:
                end_waits(group)

    def _end_process(self) -> None:
        """Ends this process if it cannot leave a wait that is over."""
        now, verdict = time.monotonic(), self.verdict
        if verdict is None or self._is_patient:
            self._judged = now
            return
        limit = _LEAVE if self.is_quick else max(_LEAVE, self._world.timeout)
        if now - self._judged < limit:
            return
        stuck = next((wait for wait in self._open_waits if wait.begun < self._judged), None)
        if stuck is not None:
            me, why = self._world.describe_rank(self._world.rank), verdict.said or "nobody comes"
            _logger.error(
                f"{me} cannot leave its wait for {stuck.what}, which is over for {limit:g} s "
                f"({why}); the process ends"
            )
            os._exit(1)

    def late(self, wait: Wait) -> Verdict:
        """Returns why a wait has ended, one whose limit was the backend's too."""
        if self.verdict is not None:
            return self.verdict
        self._tell(self._every)
        time.sleep(min(1.0, wait.world.timeout / 2))  # the others are late now, too
        self._hear(wait.ranks)
        ends, _ = self._awaited(wait.ranks, 0.0)
        if len(wait.ranks) == 1:
            ends = wait.ranks
        return Verdict(wait, ends, wait.world.timeout, None, self.describe(ends))

    def describe(self, ranks: Sequence[int]) -> str:
        """Says what global ranks have told last."""
        known = [rank for rank in ranks if self._heard[rank].number]
        return "; ".join(map(self._describe, known[:3]))

    def _describe(self, rank: int) -> str:
        heard, name = self._heard[rank], self._world.describe_rank(rank)
        does = heard.does or "runs code of the program"
        if self._missed(rank):
            silence = f"{self._silence(rank):.0f} s"
            return f"{name} is silent for {silence}, and told before: {does}"
        return f"{name} {does}" + f", {heard.idle:.0f} s without progress" * (heard.idle >= 1)


def end_waits(group: Any) -> None:
    """Ends what waits on a process group of gloo, in all threads.

    gloo ends all connections of the group once a single message is late.
    """
    for peer in range(group.size()):  # a message of a rank that is gone fails before it is late
        if peer != group.rank():
            with suppress(RuntimeError):
                group.recv([torch.empty(1)], peer, TAG_END).wait(timedelta(milliseconds=1))
