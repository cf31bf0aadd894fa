"""The ranks that train together: one generation of process groups.

A world is passed explicitly. A generation is one `init_process_group` over a prefixed store
(`gen/<k>`). A planned change of the world therefore takes milliseconds and needs no restart. CPU
tensors travel by gloo. CUDA tensors travel by NCCL, with a communicator per channel. In a `staged`
world gloo carries them through host memory.

All ranks of a generation are one world. `mesh.arrange` gives views of it for pipelines that train
side by side (replicas). A view is a world too, in which ranks count from 0. So code for one
pipeline need not know that there are others.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import signal
import socket
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from dynmo.errors import (
    DynmoError,
    InputError,
    PeerFailed,
    RankDied,
    RunError,
    WaitTimeout,
    notes,
    place,
)
from dynmo.kernels.torch_private import abort_communicators, default_store, set_group_timeout
from dynmo.runtime.comm.deadline import call_with_limit
from dynmo.runtime.comm.device_waits import POLL, DeviceWaits
from dynmo.runtime.comm.error_text import LATE, first_line, ranks_text, reason
from dynmo.runtime.comm.headers import TAG_SUMS
from dynmo.runtime.comm.process_groups import (
    backend_of,
    form_default_group,
    form_group_within,
    leave_default_group,
    new_group,
)
from dynmo.runtime.comm.store import find_missing, find_present
from dynmo.runtime.comm.tree import MOST, Tree

# NCCL counts its limit from when work is enqueued, which may be a step ahead of the device. It then
# ends the process. So its limit is lifted, and `World.look` and `World.settle` keep the real one.
_NEVER = timedelta(days=30)


class _StagedReceive(dist.Work):
    """A receive into host memory, since gloo has no CUDA tensors.

        sender     device --copy--> host --gloo--> host --copy--> device     receiver

    `wait` waits for the message, and copies it to its target on the current stream.
    """

    def __init__(self, work: dist.Work, host: Tensor, target: Tensor) -> None:
        super().__init__()
        self._work, self._host, self._target = work, host, target

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._work.wait() if timeout is None else self._work.wait(timeout)
        self._target.copy_(self._host)
        return True


@dataclass
class World:
    """The ranks that train together. `dynmo.init` makes one.

    Attributes:
        rank: This rank's number, from 0.
        size: Number of ranks.
        device: Device on which this rank computes.
        timeout: Limit of every wait, in seconds.
        generation: Number of times that the ranks have met anew.
        is_outside: Whether this process is no rank of the training that it belongs to.
        store: Store for what no collective can tell, such as who failed.
        home: Store in which later generations of this world meet, and ranks that want to join
            announce themselves. None: within a program's own process groups, which do not change.

    Example:
        >>> import dynmo
        >>> with dynmo.init(device="cpu") as world:
        ...     world.describe_rank(0)
        'rank 0'
    """

    rank: int
    size: int
    device: torch.device
    timeout: float
    generation: int
    store: dist.Store
    # Group for messages that have no communicator of their own. None in a world of one rank, which
    # needs no messages.
    group: dist.ProcessGroup | None = None
    # All messages travel by gloo, through host memory. Ranks may then share a GPU.
    staged: bool = False
    channels: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet[Any])
    # For a view: the global ranks of all worlds that it is one of, and its index among them. Then
    # its group (None: the group of all ranks).
    subgroups: tuple[tuple[int, ...], ...] = ()
    subgroup: int = 0
    process_group: dist.ProcessGroup | None = None
    # All ranks of this generation, and the ranks that do the same as this one in the other
    # replicas. None: this rank's world has no others.
    _everyone: World | None = field(default=None, repr=False, compare=False)
    _peers: World | None = field(default=None, repr=False, compare=False)
    # For the world of all ranks: its views, their groups, and the number of replicas. The key of a
    # group is whether it is apart, and its global ranks. A shape that comes back needs no new
    # groups.
    _views: list[World] = field(default_factory=list["World"], repr=False, compare=False)
    _process_groups: dict[tuple[int, ...], Any] = field(
        default_factory=dict[tuple[int, ...], Any], repr=False, compare=False
    )
    _shape: int = 1
    # For a world within a program's own process groups: torch's number of each rank. Empty: the
    # world is torch's default group.
    _torch_ranks: tuple[int, ...] = field(default=(), repr=False, compare=False)
    # NCCL's communicators, by tag and global ranks.
    _channel_groups: dict[tuple[int, ...], Any] = field(
        default_factory=dict[tuple[int, ...], Any], repr=False, compare=False
    )
    home: dist.Store | None = field(default=None, repr=False, compare=False)
    is_outside: bool = field(default=False, repr=False, compare=False)
    # Whether `dynmo.init` made it, for a loop of one's own.
    is_of_loop: bool = field(default=False, repr=False, compare=False)
    # The error of a rank that gave up, as it told it.
    _told: str | None = field(default=None, repr=False, compare=False)
    # Why the ranks cannot go on, after an error.
    _lost: str | None = field(default=None, repr=False, compare=False)
    # Limit of waits after the set-up. None: the set-up is over.
    _after_setup: float | None = field(default=None, repr=False, compare=False)
    # torch's number of threads before `take_threads`.
    _threads_before: int | None = field(default=None, repr=False, compare=False)
    # CUDA: waits of the stream for others.
    waits: DeviceWaits = field(default_factory=DeviceWaits, repr=False, compare=False)

    def __repr__(self) -> str:
        which = "no rank yet" if self.is_outside else f"rank {self.rank} of {self.size}"
        return f"World({which}, {self.device})"

    @classmethod
    def join(
        cls,
        store: dist.Store,
        rank: int,
        size: int,
        *,
        device: torch.device | None = None,
        timeout: float = 120.0,
        generation: int = 0,
        staged: bool = False,
        setup_timeout: float = 0.0,
    ) -> World:
        """Meets the other ranks of this generation.

        Args:
            store: Shared by all ranks.
            device: Device on which this rank computes. The default is the CPU.
            timeout: Limit of every wait, in seconds.
            generation: Number of times that the ranks have met before.
            staged: Whether all messages pass through host memory. Ranks may then share a GPU.
            setup_timeout: Limit of waits until `end_setup`, if that is longer.

        Raises:
            WaitTimeout: A rank did not come in time. The message names it.
            RankDied: A rank came and is gone again.
        """
        device = device or torch.device("cpu")
        prefixed = dist.PrefixStore(f"gen/{generation}", store)
        world = cls(rank, size, device, timeout, generation, prefixed, staged=staged, home=prefixed)
        world._begin_setup(setup_timeout)
        world._meet(timeout)
        return world

    @classmethod
    def outside(
        cls, home: dist.Store, *, device: torch.device, timeout: float, staged: bool = False
    ) -> World:
        """Makes a world of this process alone, which will go on in another one (`renew`).

        `home` is that world's (`World.home`).
        """
        return cls(0, 1, device, timeout, 0, home, staged=staged, home=home, is_outside=True)

    def renew(self, rank: int, size: int, generation: int, join_timeout: float) -> None:
        """Goes on as another number of ranks, in the same processes. All of them call it.

        This rank's groups end, and new ones are made. Views of the world must be made anew.

        Args:
            generation: Number of the new generation. A number can be used once.
            join_timeout: Seconds to wait for the other ranks to come.

        Raises:
            WaitTimeout: A rank did not come in time. The message names it.
            RankDied: A rank came and is gone again.
        """
        assert self.everyone is self, "all ranks are renewed at once"
        self._end_groups(failed=False)
        self._peers, self.is_outside, self._told = None, False, None
        self._shape, self.rank, self.size, self.generation = 1, rank, size, generation
        self.store = dist.PrefixStore(f"again/{generation}", self.home or self.store)
        self.waits, hook = DeviceWaits(), sys.excepthook
        self._meet(join_timeout)
        sys.excepthook = hook  # torch puts its own around it again, and would lose the line

    def leave(self) -> None:
        """Leaves the ranks. This process is alone until `renew`."""
        self.close()
        self._peers, self.is_outside = None, True
        self._shape, self.rank, self.size = 1, 0, 1
        if self.home is not None:
            self.store = self.home

    def _meet(self, join_timeout: float) -> None:
        """Forms the group. All must have come within `join_timeout` seconds."""
        if self._torch_ranks:
            self.group = self.process_group = form_group_within(
                self._torch_ranks, backend=backend_of(self.enqueues), timeout=self.timeout
            )
            self._lift_limit(self.group)
            return
        self.group = form_default_group(
            self.store,
            self.rank,
            self.size,
            backend=backend_of(self.enqueues),
            timeout=self.timeout,
            join_timeout=join_timeout,
        )
        self._lift_limit(self.group)

    def _begin_setup(self, timeout: float) -> None:
        if timeout > self.timeout:
            self._after_setup, self.timeout = self.timeout, timeout

    def end_setup(self) -> None:
        """Gives waits their usual limit, once all ranks have made a step."""
        everyone = self.everyone
        if everyone._after_setup is None:
            return
        for world in (everyone, *everyone._views):
            world.timeout = everyone._after_setup
        for group in {everyone.group, *everyone._process_groups.values()} - {None}:
            set_group_timeout(group, torch.device("cpu"), timedelta(seconds=everyone.timeout))
        everyone._after_setup = None

    @property
    def usual_timeout(self) -> float:
        """Limit of waits after the set-up."""
        return self.everyone._after_setup or self.timeout

    @classmethod
    def adopt(
        cls,
        ranks: Sequence[int],
        *,
        device: torch.device,
        timeout: float,
        staged: bool = False,
        setup_timeout: float = 0.0,
    ) -> World:
        """Makes a world within a program's own process groups. Only its ranks call it.

        Args:
            ranks: Ranks of torch's default group, in ascending order. They become ranks 0, 1, ...
            staged: Whether all messages pass through host memory.
            setup_timeout: Limit of waits until `end_setup`, if that is longer.

        Raises:
            WaitTimeout: A rank did not call in time.
            RankDied: A rank ended meanwhile.
        """
        rank = ranks.index(dist.get_rank())
        store = dist.PrefixStore(f"dynmo/{'-'.join(map(str, ranks))}", default_store())
        world = cls(rank, len(ranks), device, timeout, 0, store, staged=staged)
        world._torch_ranks = tuple(ranks)
        world._begin_setup(setup_timeout)
        world._meet(timeout)
        return world

    def close(self, failed: bool = False) -> None:
        """Ends this generation, with all its views. All ranks call it.

        Args:
            failed: Whether messages may be under way that nobody will send.
        """
        everyone = self.everyone
        atexit.unregister(everyone.close)  # `dynmo.init` registers it
        self._end_groups(failed)
        if everyone._threads_before is not None:
            torch.set_num_threads(everyone._threads_before)
            everyone._threads_before = None

    def _end_groups(self, failed: bool) -> None:
        everyone = self.everyone
        # The channels' threads must not be inside the backend when it goes.
        for channels in list(self.channels):
            channels.close()
        if failed and self.enqueues and dist.is_initialized():
            # Communicators end in order once their work is done. After a failure that would be
            # never, and the failure could not be told.
            abort_communicators()
        adopted = (
            [everyone.group, *everyone._process_groups.values(), *everyone._channel_groups.values()]
            if everyone._torch_ranks
            else []
        )
        # A group ends, and its peers are told, when the last reference to it goes.
        for world in (everyone, *everyone._views):
            world.group = world.process_group = None
        everyone._views.clear()
        everyone._process_groups.clear()
        everyone._channel_groups.clear()
        if not everyone._torch_ranks:
            leave_default_group()
        for group in adopted:
            if group is not None:
                dist.destroy_process_group(group)

    def take_threads(self, threads: int) -> int:
        """Sets the number of threads on CPU until `close`. Returns the number before."""
        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(threads)
        return self._threads_before

    def __enter__(self) -> World:
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
                self.store.set(f"interrupted/{self.everyone.rank}", "1")
            self.close(failed=True)
        finally:
            signal.signal(signal.SIGINT, handler)

    @property
    def enqueues(self) -> bool:
        """Whether the device's stream waits for messages (NCCL), and not the host (gloo)."""
        return self.device.type == "cuda" and not self.staged

    # -- the mesh ----------------------------------------------------------------------------------

    @property
    def everyone(self) -> World:
        """The world of all ranks of this generation, by global rank."""
        return self._everyone or self

    @property
    def peers(self) -> World:
        """The ranks that hold the same layers in the other pipelines, by replica."""
        return self._peers or World(0, 1, self.device, self.timeout, self.generation, self.store)

    @property
    def replica(self) -> int:
        return 0 if self._peers is None else self._peers.rank

    @property
    def replicas(self) -> int:
        return 1 if self._peers is None else self._peers.size

    def global_rank(self, rank: int) -> int:
        return self.subgroups[self.subgroup][rank] if self.subgroups else rank

    def describe_rank(self, rank: int) -> str:
        return "rank " + self._describe(self.global_rank(rank))

    def _describe(self, global_rank: int) -> str:
        replicas = self.everyone._shape
        return (
            f"{global_rank} (replica {global_rank % replicas})"
            if replicas > 1
            else str(global_rank)
        )

    def name_ranks(self, ranks: Sequence[int]) -> str:
        return ranks_text([self._describe(self.global_rank(rank)) for rank in ranks])

    def reshaped(self, replicas: int) -> None:
        """Takes note of another number of replicas."""
        self._shape = replicas

    def with_peers(self, peers: World) -> World:
        self._peers = peers
        return self

    def view(self, subgroups: Sequence[tuple[int, ...]], what: str, apart: bool = False) -> World:
        """Divides all ranks into worlds of their own. All call it on the world of all.

        Args:
            subgroups: Global ranks of each world. Every rank is in one.
            what: Name of what the ranks wait for here, for messages.
            apart: Whether its collectives may run beside those of another view of the same ranks.
                They then have a process group of their own.
        """
        self._check_groups()
        everyone, most = self.everyone, self.everyone.size + apart
        subgroup, ranks = next(
            (number, ranks) for number, ranks in enumerate(subgroups) if everyone.rank in ranks
        )
        try:
            for members in subgroups:  # all make all groups, in one order
                key = (int(apart), *members)
                if 1 < len(members) < most and key not in everyone._process_groups:
                    group = everyone._new_group(members)
                    everyone._process_groups[key] = group if ranks == members else None
                    self._lift_limit(everyone._process_groups[key])
        except RuntimeError as error:
            everyone.fail(error, None, what)
        world = World(
            ranks.index(everyone.rank),
            len(ranks),
            self.device,
            self.timeout,
            self.generation,
            self.store,
            everyone.group,
            self.staged,
        )
        world.subgroups, world.subgroup = tuple(subgroups), subgroup
        world.process_group = everyone._process_groups.get(
            (int(apart), *ranks), everyone.process_group
        )
        world.channels, world._everyone = everyone.channels, everyone
        everyone._views.append(world)
        return world

    def _new_group(self, members: Sequence[int], backend: str | None = None) -> Any:
        ranks = [self._torch_rank(rank) for rank in members]
        return new_group(ranks, self.timeout, backend, self.size)

    # -- point to point ----------------------------------------------------------------------------

    def open_channels(self, pairs: Sequence[tuple[int, ...]]) -> None:
        """Makes NCCL's communicators, one per channel. gloo needs none: it has tags.

        Args:
            pairs: Keys (tag, source, target), in the same order on all ranks. A communicator that
                was made for another mesh is used again.
        """
        if not self.enqueues:
            return
        groups, opened = self.everyone._channel_groups, list[tuple[int, ...]]()
        for key in pairs:
            for subgroup in self.subgroups or (tuple(range(self.size)),):
                tag, *ends = key[0], *(subgroup[rank] for rank in key[1:])
                if (tag, *ends) in groups:
                    continue
                try:
                    group = self.everyone._new_group(sorted(set(ends)), "nccl")
                except RuntimeError as error:
                    self.everyone.fail(error, None, "the channels to open")
                groups[tag, *ends] = group
                if self.everyone.rank in ends:
                    self._lift_limit(group)
                    opened.append(key)
        # A communicator is made at its first message. Its sender's thread stands until its
        # receiver's is there, too. So all are made now, in one order. Otherwise two ranks that both
        # send first would wait for each other for ever.
        for tag, source, target in opened:
            mark = torch.ones(1, device=self.device)
            what = (
                f"the channel from {self.describe_rank(source)} to {self.describe_rank(target)} "
                "to open"
            )
            if self.rank == source:
                self.wait(self.send(mark, target, tag), target, what)
            else:
                self.wait(self.receive(mark, source, tag), source, what)
            self.settle()

    def _channel(self, tensor: Tensor, tag: int, source: int, target: int) -> Any:
        """Returns the communicator of a message, or None if it has none of its own."""
        if not tensor.is_cuda:
            return None
        groups = self.everyone._channel_groups
        # The links are measured over one communicator in both directions.
        ends = self.global_rank(source), self.global_rank(target)
        return groups.get((tag, *ends)) or groups.get((tag, *reversed(ends)))

    def _torch_rank(self, global_rank: int) -> int:
        numbers = self.everyone._torch_ranks
        return numbers[global_rank] if numbers else global_rank

    def send(self, tensor: Tensor, target: int, tag: int) -> dist.Work:
        """Begins to send a contiguous tensor. It must not change until the work is done."""
        group = self._channel(tensor, tag, self.rank, target)
        self._check_groups()
        assert self.group is not None
        tensor = tensor.cpu() if self.staged else tensor
        try:
            # dist.isend looks up the group and checks the tensor anew. On a small message that is
            # half of the time.
            global_rank = self.global_rank(target)
            work = (
                dist.isend(tensor, self._torch_rank(global_rank), group=group)
                if group
                else self.group.send([tensor], global_rank, tag)
            )
        except RuntimeError as error:
            self.fail(error, [target], "room for a message")
        assert work is not None
        return work

    def receive(self, tensor: Tensor, source: int, tag: int) -> dist.Work:
        """Begins to receive into a tensor of the shape and type of what is sent."""
        group = self._channel(tensor, tag, source, self.rank)
        self._check_groups()
        assert self.group is not None
        try:
            global_rank = self.global_rank(source)
            if self.staged:
                host = torch.empty_like(tensor, device="cpu")
                return _StagedReceive(self.group.recv([host], global_rank, tag), host, tensor)
            work = (
                dist.irecv(tensor, self._torch_rank(global_rank), group=group)
                if group
                else self.group.recv([tensor], global_rank, tag)
            )
        except RuntimeError as error:
            self.fail(error, [source], "a message")
        assert work is not None
        return work

    def wait(self, work: dist.Work, peer: int, what: str) -> None:
        """Waits for a message. With NCCL the stream waits, within the limit of `settle`.

        `what` names the message in errors, such as "the activations of microbatch 3".

        Raises:
            WaitTimeout: The message did not come in time.
            RankDied: The other rank is gone.
        """
        try:
            if self.enqueues:
                with self.waits.around(self.device, [peer], what):
                    work.wait()
            else:
                work.wait(timedelta(seconds=self.timeout))
        except RuntimeError as error:
            self.fail(error, [peer], what)

    def look(self) -> None:
        """Raises WaitTimeout if the CUDA stream has stood at a wait for over `timeout`."""
        standing = self.waits.standing()
        if standing is not None and standing[0] >= self.timeout:
            raise self.late(standing[1].peers, standing[1].what)

    def settle(self) -> None:
        """Waits until the CUDA stream has passed all its waits, within `timeout`."""
        while self.waits.any:
            self.look()
            time.sleep(POLL)

    def _lift_limit(self, group: Any) -> None:
        """Lifts the limit of NCCL alone. gloo's waits keep theirs."""
        if self.enqueues and group is not None:
            set_group_timeout(group, self.device, _NEVER)

    # -- collectives: fixed-schema tensors, never objects ------------------------------------------

    def sum(self, tensor: Tensor, what: str) -> Tensor:
        """Adds a tensor up over the ranks, in place, and returns it.

        The order of the sum must not matter: one rank alone has a nonzero entry, or all are
        integers.
        """
        return self._complete(tensor, Tree.sum, dist.ReduceOp.SUM, what)

    def largest(self, tensor: Tensor, what: str) -> Tensor:
        """Takes the elementwise maximum over the ranks, in place, and returns the tensor."""
        return self._complete(tensor, Tree.largest, dist.ReduceOp.MAX, what)

    def gather(self, row: Tensor, what: str) -> Tensor:
        """Returns the rows of all ranks. They have equal shapes: [ranks, *row.shape]."""
        table = row.new_zeros(self.size, *row.shape)
        table[self.rank] = row
        return self._complete(table, Tree.gather, dist.ReduceOp.SUM, what)

    def _complete(
        self, tensor: Tensor, small: Callable[[Tree, Tensor], None], operation: Any, what: str
    ) -> Tensor:
        """Runs the collective `small` if the tensor is, and else the backend's operation."""
        if self.size > 1 and tensor.numel():
            self._check_groups()
            host = tensor.cpu() if self.staged else tensor
            try:
                if host.is_cpu and host.nbytes <= MOST:
                    small(self._tree, host)
                else:
                    dist.all_reduce(host, operation, group=self.process_group)
            except RuntimeError as error:
                self.fail(error, None, what)
            if host is not tensor:
                tensor.copy_(host)
        return tensor

    @property
    def _tree(self) -> Tree:
        assert self.group is not None
        ranks = self.subgroups[self.subgroup] if self.subgroups else range(self.size)
        # One thread may sum over a view while another one sums over everyone.
        tag = TAG_SUMS + bool(self.subgroups)
        return Tree(self.group, ranks, self.rank, tag, timedelta(seconds=self.timeout))

    def exchange(self, parts: Sequence[Tensor], sizes: Sequence[int], what: str) -> list[Tensor]:
        """Sends a tensor to every rank, and receives one from every rank.

        Args:
            parts: Tensor for each rank. Flat tensors of one type.
            sizes: Number of elements that each rank sends here.
        """
        if self.size == 1:
            return list(parts)
        self._check_groups()
        own = torch.cat(list(parts))
        own = own.cpu() if self.staged else own
        out = own.new_empty(sum(sizes))
        try:
            dist.all_to_all_single(
                out, own, list(sizes), [part.numel() for part in parts], group=self.process_group
            )
        except RuntimeError as error:
            self.fail(error, None, what)
        return list(out.to(parts[0].device).split(list(sizes)))

    def barrier(self, what: str) -> None:
        """Waits until all ranks of all replicas are here."""
        self.everyone.sum(torch.zeros(1), what)

    # -- failures ----------------------------------------------------------------------------------

    def fail(self, error: RuntimeError, peers: Sequence[int] | None, what: str) -> NoReturn:
        """Turns a backend's exception into one line that names who waits for whom."""
        text, me = first_line(error), self.describe_rank(self.rank)
        if LATE.search(text):
            raise self.late(peers, what) from error
        others = range(self.size) if peers is None else peers
        keys = [f"interrupted/{self.global_rank(rank)}" for rank in others]
        interrupted = [others[at] for at in find_present(self.store, keys)]
        if interrupted:
            who = self.name_ranks(interrupted)
            raise RankDied(f"{me} ends, because {who} was interrupted") from error
        self._raise_told(others, error)
        whom = self.name_ranks(peers) if peers else "a peer"
        raise RankDied(f"{me} lost {whom} while waiting for {what} ({reason(error)})") from error

    def give_up(self, error: Exception, is_final: bool) -> bool:
        """Ends this rank's groups after an error, before all ranks know of it.

        Ranks that wait for this one then raise its error. All meet anew here, and can go on.

        Args:
            is_final: Whether the ranks cannot go on from there.

        Returns:
            Whether all ranks have met anew.
        """
        everyone = self.everyone
        if everyone._lost is not None:
            return False
        me, text = f"{everyone.describe_rank(everyone.rank)}: ", first_line(error)
        if not isinstance(error, DynmoError):
            text = f"{type(error).__name__}: {text}{place(error)}{notes(error)}"
        text = everyone._told or me + text.removeprefix(me)
        is_final = is_final or isinstance(error, WaitTimeout | RankDied)
        kind = "final" if is_final else "input" if isinstance(error, InputError) else ""
        with contextlib.suppress(RuntimeError, TimeoutError):
            told = json.dumps({"kind": kind, "text": text})
            call_with_limit(1.0, lambda: everyone.store.set(f"gave up/{everyone.rank}", told))
        self._end_groups(failed=True)
        if not is_final:
            try:
                generation = everyone.generation + 1
                everyone.renew(everyone.rank, everyone.size, generation, everyone.timeout)
                return True
            except (RunError, RuntimeError) as late:
                text = f"{text}; {first_line(late)}"
        everyone._lost = text
        return False

    def _check_groups(self) -> None:
        if self.size > 1 and self.group is None:
            lost = self.everyone._lost
            raise RunError(
                "the world of these ranks is closed"
                if lost is None
                else f"the ranks cannot go on after an error ({lost}); start them anew, and resume "
                "from a checkpoint"
            )

    def _raise_told(self, others: Sequence[int], error: RuntimeError | None) -> None:
        """Raises the error of a rank that has given up, if there is one among others."""
        keys = [f"gave up/{self.global_rank(rank)}" for rank in others]
        for at in find_present(self.store, keys):
            told = json.loads(self.store.get(keys[at]))
            self.everyone._told = told["text"]
            kinds = {"input": InputError, "final": RankDied}
            raise kinds.get(told["kind"], PeerFailed)(told["text"]) from error

    def late(self, peers: Sequence[int] | None, what: str) -> WaitTimeout:
        """Returns the error of a wait for peers. None means some of all others."""
        late = self._not_waiting(what) if peers is None else list(peers)
        if not late and self is not self.everyone:  # some rank of another view keeps all waiting
            return self.everyone.late(None, what)
        me, others = self.describe_rank(self.rank), self.name_ranks(late)
        waited = f"{me} waited {self.timeout:g} s for {others}: {what}"
        key = "timeout" if self.everyone._after_setup is None else "setup_timeout"
        return WaitTimeout(
            f"{waited}; where it only takes longer, raise parallel.{key}",
            [self.global_rank(rank) for rank in late],
        )

    def _not_waiting(self, what: str) -> list[int]:
        """Returns the other ranks that have not given up in this collective, by the store."""
        key = f"waiting/{self.global_rank(self.rank)}"
        text = json.dumps({"host": socket.gethostname(), "what": what})
        try:
            call_with_limit(1.0, lambda: self.store.set(key, text))
        except (RuntimeError, TimeoutError):  # the rank that serves it is gone, or hangs
            return []
        time.sleep(min(1.0, self.timeout / 2))
        others = [rank for rank in range(self.size) if rank != self.rank]
        lacking = find_missing(self.store, [f"waiting/{self.global_rank(rank)}" for rank in others])
        return [others[at] for at in lacking]
