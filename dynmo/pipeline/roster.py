"""The ranks of a run that recovers: where each of them is, and which are left after a fault."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path

from dynmo.elastic.launch import Arbiter, FolderStore
from dynmo.elastic.manager import RankPlace, own_place
from dynmo.errors import RankDied, WaitTimeout
from dynmo.runtime.comm.agreement import share_texts
from dynmo.runtime.comm.heartbeat import ENDED
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.comm.signed_store import SignedStore
from dynmo.runtime.comm.survivors import Members, RollCall
from dynmo.runtime.comm.waits import call_with_limit

# Seconds in which the store must answer.
_ANSWER = 5.0


class Roster:
    """The ranks as they were counted last.

    Args:
        home: The store of the run, which outlives its ranks.

    Attributes:
        places: Where each rank runs. Empty if they were not counted.
    """

    def __init__(self, world: Meeting, home: SignedStore) -> None:
        self._world, self._home = world, home
        self.places: list[RankPlace] = []
        # This rank's number among the places, and the generation in which they have theirs.
        self._rank, self._numbered = world.rank, -1
        self._roll_calls = 0
        launcher = _launcher_of(home.clone())  # for the thread of the heartbeat
        if world.enqueues and launcher is not None:
            world.lost_process = partial(self._lost, launcher)
        world.watch_for_end()

    def count(self, number: int) -> int:
        """Counts the ranks of a new generation. All of them call it together.

        Args:
            number: A number that this rank tells the others.

        Returns:
            The highest of these numbers.
        """
        own = {"place": asdict(own_place(self._world.rank)), "calls": self._roll_calls}
        told = json.dumps(own | {"number": number})
        texts = share_texts(self._world, told, "where all ranks run")
        tables = [json.loads(text) for text in texts]
        self.places = [RankPlace(**table["place"]) for table in tables]
        self._roll_calls = max(table["calls"] for table in tables)
        self._rank, self._numbered = self._world.rank, self._world.generation
        return max(table["number"] for table in tables)

    def shares_memory(self) -> bool:
        """Returns whether all ranks are on one machine, and may read each other's memory."""
        return len(set(self._nodes)) == 1

    @property
    def _nodes(self) -> list[str]:
        return [place.node or place.host for place in self.places]

    def shift(self, replicas: int, *, is_spread: bool) -> int:
        """Returns how many ranks further a rank's copies are. 0: other replicas have its layers.

        Args:
            replicas: Number of replicas of the mesh.
            is_spread: Whether each replica has groups of its own, such as experts.
        """
        nodes = self._nodes
        together = (set(nodes[at : at + replicas]) for at in range(0, len(nodes), replicas))
        is_safe = self.shares_memory() or all(len(each) > 1 for each in together)
        if replicas > 1 and is_safe and not is_spread:
            return 0
        if len(nodes) == 1:
            return 0
        ranks = range(len(nodes))
        ways = (
            way for way in ranks if all(nodes[at] != nodes[(at + way) % len(nodes)] for at in ranks)
        )
        return next(ways, 1)

    # -- after a fault -----------------------------------------------------------------------------

    def meet(self, error: RankDied | WaitTimeout) -> list[RankPlace]:
        """Meets the ranks that are left. Returns where the others have run."""
        world = self._world
        # A silent rank is known by its number in the generation that was counted.
        knows = isinstance(error, WaitTimeout) and world.generation == self._numbered
        blames = error.ranks if isinstance(error, WaitTimeout) and knows else ()
        if world.lost is None:
            world.give_up(error, is_final=True)
        members = self._call_roll(world.generation, blames)
        dead = [self.places[rank] for rank in members.dead]
        self._rank = members.ranks.index(self._rank)
        self.places = [self.places[rank] for rank in members.ranks]
        self._roll_calls += 1
        size, limit = len(self.places), world.timeout
        world.renew(self._rank, size, members.generation, limit, after_fault=True)
        self._numbered = world.generation
        return dead

    def keep(self, ranks: int) -> bool:
        """Keeps the first ranks, which meet anew. Returns whether this rank is one of them."""
        world = self._world
        self.places = self.places[:ranks]
        if world.rank >= ranks:
            return False
        world.renew(world.rank, ranks, world.generation + 1, world.timeout)
        self._numbered = world.generation
        return True

    def why(self, dead: Sequence[RankPlace]) -> str:
        """Returns how ranks have ended, as the launcher knows it. Empty if it does not."""
        launcher, hows = _launcher_of(self._home), list[str]()
        for place in dead:
            if launcher is not None and place.process is not None:
                how = launcher.how_it_ended(place.process)
                hows += [f"rank {place.rank} {how}"] * bool(how)
        return "; ".join(hows)

    def _lost(self, launcher: Arbiter) -> str:
        """Returns which rank has ended. Empty if all run. NCCL does not tell it."""
        for place in self.places if self._numbered == self._world.generation else ():
            if place.process is not None and launcher.has_ended(place.process):
                return f"rank {place.rank} {launcher.how_it_ended(place.process)}"
        return ""

    def _call_roll(self, generation: int, blames: Sequence[int]) -> Members:
        world, launcher = self._world, _launcher_of(self._home)
        arbiter = None if launcher is None else _Processes(launcher, self.places)
        former = world.store
        with suppress(RuntimeError, TimeoutError):  # the roll call finds that the store is lost
            call_with_limit(_ANSWER, lambda: former.set(ENDED, "a rank is gone"))
        roll_call = RollCall(
            self._home,
            self._roll_calls,
            self._rank,
            len(self.places),
            lambda rank: former.find(f"heartbeat/{rank}"),
            arbiter,
            world.timeout,
            max(world.timeout, world.work_timeout),
        )
        return roll_call.members(generation, blames)


class _Processes:
    """The processes of ranks, as dynmo's launcher knows them (`survivors.Arbiter`)."""

    def __init__(self, arbiter: Arbiter, places: Sequence[RankPlace]) -> None:
        self._arbiter, self._numbers = arbiter, [place.process for place in places]

    def has_ended(self, rank: int) -> bool:
        number = self._numbers[rank]
        return number is not None and self._arbiter.has_ended(number)

    def end(self, rank: int) -> None:
        number = self._numbers[rank]
        if number is not None:
            self._arbiter.end(number)


def _launcher_of(home: SignedStore) -> Arbiter | None:
    """Returns dynmo's launcher, if it has started this process."""
    folder = os.environ.get("DYNMO_RENDEZVOUS")
    shares = "DYNMO_RENDEZVOUS_FILE" in os.environ
    return None if folder is None else Arbiter(home if shares else FolderStore(Path(folder)))
