"""Ranks that are left after a fault find each other, and agree on who goes on.

    rank 0    is here ........................ rank 1 has ended. "0 and 2 go on"      meets rank 2
    rank 1    was killed
    rank 2    still computes ...... is here ........ reads it                         meets rank 0

The lowest rank that is here decides, once all others are here or gone. A rank is gone if its
launcher says so, or if it is silent. The launcher ends a silent one first, since it may only have
been stopped. The decision is written once. A rank that is not in it must not go on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from dynmo.errors import RunError
from dynmo.runtime.comm.signed_store import SignedStore
from dynmo.runtime.comm.waits import call_with_limit, ranks_text, reason

_POLL = 0.02
# Seconds for an answer of the store, and for the launcher to end a process.
_ANSWER, _END = 5.0, 10.0
# Most seconds of silence of a living rank, if no launcher says who has ended.
_SILENCE = 5.0

_Answer = TypeVar("_Answer")


class Arbiter(Protocol):
    """What knows the processes of ranks, and ends them."""

    def has_ended(self, rank: int) -> bool: ...

    def end(self, rank: int) -> None: ...


@dataclass(frozen=True)
class Members:
    """The ranks that go on.

    Attributes:
        ranks: Their former numbers, ascending. They become ranks 0, 1, ...
        generation: The generation in which they meet.
        dead: The former numbers of the others.
    """

    ranks: tuple[int, ...]
    generation: int
    dead: tuple[int, ...]


@dataclass
class _Seen:
    """What was seen of another rank."""

    at: float
    sign: bytes | None = None
    blames: Sequence[int] | None = None  # None: it is not here yet
    generation: int = 0


@dataclass
class RollCall:
    """The call of the ranks of a former generation.

    Args:
        home: The store in which all generations of the run meet.
        number: Number of calls before.
        rank: This rank's former number.
        size: Number of former ranks.
        beat: Returns the heartbeat of a former rank, as it told it.
        arbiter: Knows the processes. None: silence alone tells.
        timeout: Seconds of silence after which a rank is gone.
        work_timeout: Most seconds for ranks that live and do not come.
    """

    home: SignedStore
    number: int
    rank: int
    size: int
    beat: Callable[[int], bytes | None]
    arbiter: Arbiter | None
    timeout: float
    work_timeout: float
    _seen: dict[int, _Seen] = field(default_factory=dict[int, _Seen])

    def members(self, generation: int, blames: Sequence[int] = ()) -> Members:
        """Waits until it is decided who goes on. Each rank that is left calls it.

        Args:
            generation: The highest generation that this rank has tried to meet in.
            blames: Former ranks that it knows to be silent.

        Raises:
            RunError: The others go on without this rank, a rank lives and does not come, or the
                store is lost.
        """
        try:
            return self._members(generation, blames)
        except TimeoutError:
            why = f"it has not answered for {_ANSWER:g} s"
        except RunError:
            raise
        except (OSError, RuntimeError) as error:
            why = reason(error)
        raise RunError(f"rank {self.rank} lost the store of the run after a fault ({why})")

    def _ask(self, call: Callable[[], _Answer]) -> _Answer:
        return call_with_limit(_ANSWER, call)

    def _members(self, generation: int, blames: Sequence[int]) -> Members:
        place, begun, beats = self.home.within(f"recover/{self.number}"), time.monotonic(), 0
        here = json.dumps({"generation": generation, "blames": list(blames)})
        self._ask(lambda: place.set(f"here/{self.rank}", here))
        others = [rank for rank in range(self.size) if rank != self.rank]
        self._seen = {rank: _Seen(begun) for rank in others}
        while True:
            decision = self._ask(lambda: place.find("decision"))
            if decision is not None:
                return self._read(decision)
            beats += 1
            self._ask(lambda: place.set(f"beat/{self.rank}", str(beats)))  # noqa: B023
            for rank in others:
                self._look(place, rank)
            here_now = {r for r, seen in self._seen.items() if seen.blames is not None}
            blamed = {*blames, *(b for r in here_now for b in self._seen[r].blames or ())}
            gone = {rank for rank in others if self._is_gone(rank, blamed)}
            alive = (here_now | {self.rank}) - gone
            absent = [rank for rank in others if rank not in alive and rank not in gone]
            if min(alive) == self.rank and not absent:
                self._decide(place, sorted(alive), sorted(gone), generation)
            elif absent and time.monotonic() - begun > self.work_timeout:
                late = f"rank {self.rank} waited {self.work_timeout:g} s for {ranks_text(absent)}"
                raise RunError(f"{late} to go on after a fault; raise parallel.work_timeout")
            time.sleep(_POLL)

    def _look(self, place: SignedStore, rank: int) -> None:
        seen = self._seen[rank]
        if seen.blames is None:
            text = self._ask(lambda: place.find(f"here/{rank}"))
            if text is not None:
                told = json.loads(text)
                seen.blames, seen.generation = told["blames"], told["generation"]
        is_here = seen.blames is not None
        sign = self._ask(lambda: place.find(f"beat/{rank}") if is_here else self.beat(rank))
        if sign != seen.sign:
            seen.sign, seen.at = sign, time.monotonic()

    def _is_gone(self, rank: int, blamed: set[int]) -> bool:
        seen = self._seen[rank]
        if self.arbiter is not None and self.arbiter.has_ended(rank):
            return True
        limit = self.timeout if self.arbiter is not None else min(self.timeout, _SILENCE)
        is_silent = time.monotonic() - seen.at >= limit and not _is_patient(seen.sign)
        return is_silent or (rank in blamed and seen.blames is None)

    def _decide(
        self, place: SignedStore, alive: Sequence[int], gone: Sequence[int], generation: int
    ) -> None:
        for rank in gone:
            self._end(rank)
        last = max(
            generation, *(self._seen[rank].generation for rank in alive if rank in self._seen), 0
        )
        # A newcomer may have been called to the next one.
        text = json.dumps({"ranks": alive, "generation": last + 2, "dead": gone})
        self._ask(lambda: place.compare_set("decision", "", text))

    def _end(self, rank: int) -> None:
        """Has a process ended that may only have been stopped."""
        arbiter, begun = self.arbiter, time.monotonic()
        if arbiter is None or arbiter.has_ended(rank):
            return
        arbiter.end(rank)
        while not arbiter.has_ended(rank):
            if time.monotonic() - begun > _END:
                late = f"rank {self.rank} waited {_END:g} s for the launcher to end rank {rank}"
                raise RunError(f"{late}, which is silent")
            time.sleep(_POLL)

    def _read(self, decision: bytes) -> Members:
        told = json.loads(decision)
        if self.rank not in told["ranks"]:
            raise RunError(
                f"rank {self.rank} was silent for too long: the other ranks went on without it"
            )
        return Members(tuple(told["ranks"]), told["generation"], tuple(told["dead"]))


def _is_patient(sign: bytes | None) -> bool:
    """Whether a heartbeat is that of a rank in a debugger."""
    return b'"is_patient": true' in (sign or b"")
