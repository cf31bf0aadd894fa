"""How ranks meet, meet again, leave and end.

A generation is one `init_process_group` over a part of the store (`gen/<k>`). A planned change of
the ranks therefore takes milliseconds and needs no restart.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from dynmo.errors import (
    DynmoError,
    InputError,
    RankDied,
    RunError,
    WaitTimeout,
    notes,
    place,
)
from dynmo.kernels.torch_private import abort_communicators, default_store
from dynmo.runtime.comm.device_waits import DeviceWaits
from dynmo.runtime.comm.heartbeat import ENDED, Heartbeat
from dynmo.runtime.comm.process_groups import (
    TRIES,
    drop_group,
    form_default_group,
    form_group_within,
    leave_default_group,
    try_groups,
)
from dynmo.runtime.comm.rank_group import RankGroup
from dynmo.runtime.comm.rendezvous import from_environment
from dynmo.runtime.comm.signed_store import SignedStore
from dynmo.runtime.comm.store import token_of
from dynmo.runtime.comm.waits import call_with_limit, first_line

_logger = logging.getLogger(__name__)

# Times that these ranks of a program's own process groups have become a world.
_adopted: dict[tuple[int, ...], int] = {}


@dataclass(repr=False)
class Meeting(RankGroup):
    """The world of all ranks of a generation. `dynmo.init` makes one.

    Attributes:
        home: Store in which later generations of this world meet, and ranks that want to join
            announce themselves. None: within a program's own process groups, which do not change.
        is_outside: Whether this process is no rank of the training that it belongs to.
        is_of_loop: Whether `dynmo.init` made it, for a loop of one's own.
        work_timeout: Limit of work without progress, if that is longer than `timeout`.
        recovers: Whether the others go on if a rank is gone.

    Example:
        >>> import dynmo
        >>> with dynmo.init(device="cpu") as world:
        ...     world.describe_rank(0)
        'rank 0'
    """

    home: SignedStore | None = None
    is_outside: bool = False
    is_of_loop: bool = False
    work_timeout: float = 0.0
    recovers: bool = False
    # Tells which rank has ended, where the backend does not. Empty if none has.
    lost_process: Callable[[], str] | None = field(default=None, repr=False, compare=False)
    # The views, and their groups by whether a view has its own, and its global ranks. A shape that
    # comes back needs no new groups.
    views: list[RankGroup] = field(default_factory=list[RankGroup])
    process_groups: dict[tuple[int, ...], Any] = field(default_factory=dict[tuple[int, ...], Any])
    # Parts of the store in which another rank may tell the end of this meeting.
    _watched: list[SignedStore] = field(default_factory=list[SignedStore])
    # torch's number of threads before `take_threads`.
    _threads_before: int | None = None

    def __repr__(self) -> str:
        which = "no rank yet" if self.is_outside else f"rank {self.rank} of {self.size}"
        return f"World({which}, {self.device})"

    @classmethod
    def join(
        cls,
        store: SignedStore,
        rank: int,
        size: int,
        *,
        device: torch.device | None = None,
        timeout: float = 120.0,
        generation: int = 0,
        staged: bool = False,
        work_timeout: float = 0.0,
    ) -> Meeting:
        """Meets the other ranks of this generation.

        Args:
            store: Shared by all ranks.
            device: Device on which this rank computes. The default is the CPU.
            timeout: Limit of every wait, in seconds.
            generation: Number of times that the ranks have met before.
            staged: Whether all messages pass through host memory. Ranks may then share a GPU.
            work_timeout: Limit of work without progress, and of waits until `end_setup`, if that is
                longer.

        Raises:
            WaitTimeout: A rank did not come in time. The message names it.
            RankDied: A rank came and is gone again.
        """
        device = device or torch.device("cpu")
        prefixed = store.within(f"gen/{generation}")
        world = cls(rank, size, device, timeout, generation, prefixed, staged=staged, home=prefixed)
        world._begin_setup(work_timeout)
        world._meet(timeout)
        return world

    @classmethod
    def outside(
        cls,
        home: SignedStore,
        *,
        device: torch.device,
        timeout: float,
        work_timeout: float = 0.0,
        staged: bool = False,
    ) -> Meeting:
        """Makes a world of this process alone, which will go on in another one (`renew`).

        `home` is that world's.
        """
        world = cls(0, 1, device, timeout, 0, home, staged=staged, home=home, is_outside=True)
        world.work_timeout = work_timeout
        return world

    def renew(
        self,
        rank: int,
        size: int,
        generation: int,
        join_timeout: float,
        *,
        after_fault: bool = False,
    ) -> None:
        """Goes on as another number of ranks, in the same processes. All of them call it.

        This rank's groups end, and new ones are made. Views of the world must be made anew.

        Args:
            generation: Number of the new generation. A number can be used once.
            join_timeout: Seconds to wait for the other ranks to come.
            after_fault: Whether the generation before has ended by a fault, as all ranks know.

        Raises:
            WaitTimeout: A rank did not come in time. The message names it.
            RankDied: A rank came and is gone again.
        """
        self._end_groups(failed=False)
        knows_former = not (after_fault or self.is_outside)
        self._peers, self.is_outside, self.peer_error, self.lost = None, False, None, None
        self.shape, self.rank, self.size, self.generation = 1, rank, size, generation
        former, self.store = self.store, (self.home or self.store).within(f"again/{generation}")
        self._watched = [former, self.store] if knows_former else [self.store]
        self.waits, hook = DeviceWaits(), sys.excepthook
        self._meet(join_timeout)
        sys.excepthook = hook  # torch puts its own around it again, and would lose the line

    def leave(self) -> None:
        """Leaves the ranks. This process is alone until `renew`."""
        self.close()
        self._peers, self.is_outside = None, True
        self.shape, self.rank, self.size = 1, 0, 1
        if self.home is not None:
            self.store = self.home

    def _meet(self, join_timeout: float) -> None:
        """Forms the group. All must have come within `join_timeout` seconds."""
        if self.torch_ranks:
            self.group = self.process_group = form_group_within(
                self.store, self.torch_ranks, enqueues=self.enqueues, timeout=self.timeout
            )
        else:
            self.group = form_default_group(
                self.store,
                self.rank,
                self.size,
                enqueues=self.enqueues,
                timeout=self.timeout,
                join_timeout=join_timeout,
                is_over=self._is_over if self.recovers else None,
            )
        if self.size > 1:
            self.heartbeat = Heartbeat(self, self.store, self.usual_timeout, self.work_timeout)
            if self.recovers:
                self.watch_for_end()
        self._lift_limit(self.group)

    def _is_over(self) -> bool:
        """Whether a rank that others wait for has told that it does not come."""
        return any(store.check([ENDED]) for store in self._watched)

    def watch_for_end(self) -> None:
        """Has the waits of this rank end soon once another rank is gone, so that it goes on."""
        self.recovers = True
        if self.heartbeat is not None:
            self.heartbeat.is_quick, self.heartbeat.lost = True, self.lost_process
            self.heartbeat.abort = abort_communicators if self.enqueues else None

    def _begin_setup(self, timeout: float) -> None:
        self.work_timeout = timeout
        if timeout > self.timeout:
            self.after_setup, self.timeout = self.timeout, timeout

    def end_setup(self) -> None:
        """Gives waits their usual limit, once all ranks have made a step."""
        if self.after_setup is None:
            return
        for world in (self, *self.views):
            world.timeout = self.after_setup
        self.after_setup = None

    @property
    def leads(self) -> bool:
        """Whether this process is rank 0 of the training."""
        return self.rank == 0 and not self.is_outside

    @property
    def usual_timeout(self) -> float:
        """Limit of waits after the set-up."""
        return self.after_setup or self.timeout

    @classmethod
    def adopt(
        cls,
        ranks: Sequence[int],
        *,
        device: torch.device,
        timeout: float,
        staged: bool = False,
        work_timeout: float = 0.0,
    ) -> Meeting:
        """Makes a world within a program's own process groups. Only its ranks call it.

        Args:
            ranks: Ranks of torch's default group, in ascending order. They become ranks 0, 1, ...
            staged: Whether all messages pass through host memory.
            work_timeout: Limit of work without progress, and of waits until `end_setup`, if that is
                longer.

        Raises:
            WaitTimeout: A rank did not call in time.
            RankDied: A rank ended meanwhile.
        """
        rank, place = ranks.index(dist.get_rank()), tuple(ranks)
        _adopted[place] = number = _adopted.get(place, 0) + 1
        plain = dist.PrefixStore(f"dynmo/{'-'.join(map(str, ranks))}/{number}", default_store())
        launched = from_environment()
        is_local = launched is not None and (launched.local or launched.loopback)
        store = SignedStore(plain, token_of(plain, rank, is_local, timeout))
        world = cls(rank, len(ranks), device, timeout, 0, store, staged=staged)
        world.torch_ranks = tuple(ranks)
        world._begin_setup(work_timeout)
        world._meet(timeout)
        return world

    def view(
        self, subgroups: Sequence[tuple[int, ...]], what: str, own_group: bool = False
    ) -> RankGroup:
        """Divides all ranks into worlds of their own. All call it.

        Args:
            subgroups: Global ranks of each world. Every rank is in one.
            what: Name of what the ranks wait for here, for messages.
            own_group: Whether its collectives may run beside those of another view of the same
                ranks. They then have a process group of their own.
        """
        self._check_groups()
        limit = self.size + own_group
        subgroup, ranks = next(
            (number, ranks) for number, ranks in enumerate(subgroups) if self.rank in ranks
        )
        groups = self.process_groups
        keys = [(int(own_group), *members) for members in subgroups if 1 < len(members) < limit]
        groups |= self._make_groups([key for key in keys if key not in groups], what)
        self._lift_limit(groups.get((int(own_group), *ranks)))
        world = RankGroup(
            ranks.index(self.rank),
            len(ranks),
            self.device,
            self.timeout,
            self.generation,
            self.store,
            self.group,
            self.staged,
            self.channels,
            tuple(subgroups),
            subgroup,
            groups.get((int(own_group), *ranks), self.process_group),
            self,
        )
        self.views.append(world)
        return world

    def _make_groups(
        self, keys: Sequence[tuple[int, ...]], what: str
    ) -> dict[tuple[int, ...], Any]:
        trouble = ""
        for number in range(TRIES if keys else 0):
            store = self.store.within(f"groups/{number}")
            with self.waiting(None, what):
                made, trouble = try_groups(store, keys, self.rank, self.timeout, self._new_group)
            # All ranks have proven to each other who they are, so they can agree here.
            if not self.largest(torch.tensor([bool(trouble)]), what):
                return made
            for group in made.values():
                drop_group(group)
            trouble = trouble or "a connection of other ranks is not proven"
            if self.rank == 0:
                _logger.warning(f"{trouble}; the ranks drop {what} and make them anew")
        if keys:
            raise RunError(f"{what} could not be made in {TRIES} tries ({trouble})")
        return {}

    def close(self, failed: bool = False) -> None:
        """Ends this generation, with all its views. All ranks call it.

        Args:
            failed: Whether messages may be under way that nobody will send.
        """
        atexit.unregister(self.close)  # `dynmo.init` registers it
        self._end_groups(failed)
        if self._threads_before is not None:
            torch.set_num_threads(self._threads_before)
            self._threads_before = None

    def _end_groups(self, failed: bool) -> None:
        if self.heartbeat is not None:
            self.heartbeat.close()
            self.heartbeat = None
        # The channels' threads must not be inside the backend when it goes.
        for channels in list(self.channels):
            channels.close()
        if failed and self.enqueues and dist.is_initialized():
            # Communicators end in order once their work is done. After a failure that would be
            # never, and the failure could not be told.
            abort_communicators()
        groups = [self.group, *self.process_groups.values(), *self.channel_groups.values()]
        # A group ends, and its peers are told, when the last reference to it goes.
        for world in (self, *self.views):
            world.group = world.process_group = None
        self.views.clear()
        self.process_groups.clear()
        self.channel_groups.clear()
        if not self.torch_ranks:
            groups.clear()
            leave_default_group()
        for group in groups:
            drop_group(group)

    def take_threads(self, threads: int) -> int:
        """Sets the number of threads on CPU until `close`. Returns the number before."""
        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(threads)
        return self._threads_before

    def __enter__(self) -> Meeting:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not KeyboardInterrupt:
            self.close(failed=kind is not None)
            return
        # The launcher may send the signal again. The groups end all the same.
        handler = signal.getsignal(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            with contextlib.suppress(RuntimeError):  # the rank that serves the store is gone
                self.store.set(f"interrupted/{self.rank}", "1")
            self.close(failed=True)
        finally:
            signal.signal(signal.SIGINT, handler)

    def give_up(self, error: Exception, is_final: bool) -> bool:
        """Ends this rank's groups after an error, before all ranks know of it.

        Ranks that wait for this one then raise its error. All meet anew here, and can go on.

        Args:
            is_final: Whether the ranks cannot go on from there.

        Returns:
            Whether all ranks have met anew.
        """
        if self.lost is not None:
            return False
        me, text = f"{self.describe_rank(self.rank)}: ", first_line(error)
        if not isinstance(error, DynmoError):
            text = f"{type(error).__name__}: {text}{place(error)}{notes(error)}"
        text = self.peer_error or me + text.removeprefix(me)
        is_comm = isinstance(error, WaitTimeout | RankDied)
        is_lost = is_comm and (not isinstance(error, RankDied) or error.is_fault)
        kind = "input" if isinstance(error, InputError) else ""
        kind, is_final = "lost" if is_lost else "final" if is_final else kind, is_final or is_comm
        with contextlib.suppress(RuntimeError, TimeoutError):
            content = json.dumps({"kind": kind, "text": text})
            call_with_limit(1.0, lambda: self.store.set(f"gave up/{self.rank}", content))
            if is_lost:
                call_with_limit(1.0, lambda: self.store.set(ENDED, text))
        self._end_groups(failed=True)
        if not is_final:
            try:
                generation = self.generation + 1
                self.renew(self.rank, self.size, generation, self.timeout)
                return True
            except (RunError, RuntimeError) as late:
                text = f"{text}; {first_line(late)}"
        self.lost = text
        return False


def meeting_of(world: RankGroup) -> Meeting:
    """Returns the world of all ranks, which can meet again, leave and end."""
    everyone = world.everyone
    assert isinstance(everyone, Meeting)
    return everyone
