"""Ranks that train together: their collectives, messages and groups.

A group is passed explicitly. CPU tensors travel by gloo. CUDA tensors travel by NCCL, with a
communicator per channel. In a `staged` group gloo carries them through host memory.

All ranks of a generation are one group (`Meeting`, which a loop knows as `dynmo.World`).
`process_mesh.arrange` gives views of it for pipelines that train side by side (replicas). A view is
a group too, in which ranks count from 0. So code for one pipeline need not know of the others.
"""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn, Self

import torch
import torch.distributed as dist
from torch import Tensor

from dynmo.errors import InputError, PeerFailed, RankDied, RunError, WaitTimeout
from dynmo.kernels.torch_private import set_group_timeout
from dynmo.runtime.comm.device_waits import POLL, DeviceWait, DeviceWaits, StagedReceive
from dynmo.runtime.comm.headers import TAG_SUMS
from dynmo.runtime.comm.heartbeat import ENDED, Heartbeat, Verdict, Wait
from dynmo.runtime.comm.process_groups import new_group
from dynmo.runtime.comm.signed_store import SignedStore
from dynmo.runtime.comm.store import find_present
from dynmo.runtime.comm.tree import FEW, MOST, Tree
from dynmo.runtime.comm.waits import LATE, first_line, ranks_text, reason

# NCCL counts its limit from when work is enqueued, which may be a step ahead of the device. It then
# ends the process. gloo ends all connections, even if the others only take longer. So the limits of
# both are lifted. `Heartbeat` keeps the real one, and on CUDA `RankGroup.look` asks it.
_NEVER = timedelta(days=30)


@dataclass
class RankGroup:
    """Ranks that train together: their collectives, messages and groups.

    Attributes:
        rank: This rank's number, from 0.
        size: Number of ranks.
        device: Device on which this rank computes.
        timeout: Limit of every wait, in seconds.
        generation: Number of times that the ranks have met anew.
        store: Store for what no collective can tell, such as who failed.
    """

    rank: int
    size: int
    device: torch.device
    timeout: float
    generation: int
    store: SignedStore
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
    _everyone: RankGroup | None = field(default=None, repr=False, compare=False)
    _peers: RankGroup | None = field(default=None, repr=False, compare=False)
    # For the world of all ranks: the number of replicas.
    shape: int = 1
    # For a world within a program's own process groups: torch's number of each rank. Empty: the
    # world is torch's default group.
    torch_ranks: tuple[int, ...] = field(default=(), repr=False, compare=False)
    # NCCL's communicators, by tag and global ranks.
    channel_groups: dict[tuple[int, ...], Any] = field(
        default_factory=dict[tuple[int, ...], Any], repr=False, compare=False
    )
    # Why the ranks cannot go on, after an error.
    lost: str | None = field(default=None, repr=False, compare=False)
    # Limit of waits after the set-up. None: the set-up is over.
    after_setup: float | None = field(default=None, repr=False, compare=False)
    # For the world of all ranks: what ends their waits. None: each wait has its own limit.
    heartbeat: Heartbeat | None = field(default=None, repr=False, compare=False)
    # The error of a rank that gave up, as it told it.
    peer_error: str | None = field(default=None, repr=False, compare=False)
    # CUDA: waits of the stream for others.
    waits: DeviceWaits = field(default_factory=DeviceWaits, repr=False, compare=False)
    # CUDA: the one at which the stream stands, while the host looks.
    _at: DeviceWait | None = field(default=None, repr=False, compare=False)
    _standing: Wait | None = field(default=None, repr=False, compare=False)

    @property
    def enqueues(self) -> bool:
        """Whether the device's stream waits for messages (NCCL), and not the host (gloo)."""
        return self.device.type == "cuda" and not self.staged

    # -- the mesh ----------------------------------------------------------------------------------

    @property
    def everyone(self) -> RankGroup:
        """The world of all ranks of this generation, by global rank."""
        return self._everyone or self

    @property
    def peers(self) -> RankGroup:
        """The ranks that hold the same layers in the other pipelines, by replica."""
        return self._peers or RankGroup(
            0, 1, self.device, self.timeout, self.generation, self.store
        )

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
        replicas = self.everyone.shape
        return f"{global_rank}" + f" (replica {global_rank % replicas})" * (replicas > 1)

    def name_ranks(self, ranks: Sequence[int]) -> str:
        return ranks_text([self._describe(self.global_rank(rank)) for rank in ranks])

    def with_peers(self, peers: RankGroup) -> Self:
        self._peers = peers
        return self

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
        groups, opened = self.everyone.channel_groups, list[tuple[int, ...]]()
        for key in pairs:
            for subgroup in self.subgroups or (tuple(range(self.size)),):
                tag, *ends = key[0], *(subgroup[rank] for rank in key[1:])
                if (tag, *ends) in groups:
                    continue
                with self.everyone.waiting(None, "the channels to open"):
                    group = self.everyone._new_group(sorted(set(ends)), "nccl")
                groups[tag, *ends] = group
                if self.everyone.rank in ends:
                    set_group_timeout(group, self.device, _NEVER)
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
        groups = self.everyone.channel_groups
        # The links are measured over one communicator in both directions.
        ends = self.global_rank(source), self.global_rank(target)
        return groups.get((tag, *ends)) or groups.get((tag, *reversed(ends)))

    def _torch_rank(self, global_rank: int) -> int:
        numbers = self.everyone.torch_ranks
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
                return StagedReceive(self.group.recv([host], global_rank, tag), host, tensor)
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
        if self.enqueues:
            try:
                with self.waits.around(self.device, [peer], what):
                    work.wait()
            except RuntimeError as error:
                self.fail(error, [peer], what)
        else:
            with self.waiting([peer], what, self.group):
                work.wait(self.limit)

    def waiting(self, peers: Sequence[int] | None, what: str, group: Any = None) -> Wait:
        """Marks a wait of this thread for others. None means some of all others.

        Args:
            group: The process group that carries it. None: the caller asks `Wait.is_over`.

        Raises:
            WaitTimeout: The others do not come.
            RankDied: Another rank is gone.
        """
        return Wait((self._everyone or self).heartbeat, self, peers, what, group)

    @property
    def limit(self) -> timedelta:
        """What a wait of gloo gets as its limit."""
        return timedelta(seconds=self.timeout) if self.everyone.heartbeat is None else _NEVER

    def look(self) -> None:
        """Raises WaitTimeout if the CUDA stream has stood at a wait for too long."""
        standing, heartbeat = self.waits.standing(), self.everyone.heartbeat
        if heartbeat is None:
            if standing is not None and standing[0] >= self.timeout:
                raise self.late(standing[1].peers, standing[1].what)
            return
        if self._standing is not None and (standing is None or standing[1] is not self._at):
            self.look_away()
        if standing is not None and self._standing is None:
            self._at = standing[1]
            self._standing = Wait(heartbeat, self, self._at.peers, self._at.what)
            heartbeat.begin(self._standing)
        if self._standing is not None and self._standing.is_over:
            late, _ = self.late(None, self._standing.what, self._standing), self.look_away()
            raise late

    def look_away(self) -> None:
        """Ends what `look` has begun: the host does not follow the stream any more."""
        if self._standing is not None and self.everyone.heartbeat is not None:
            self.everyone.heartbeat.end(self._standing)
        self._standing = self._at = None

    def settle(self) -> None:
        """Waits until the CUDA stream has passed all its waits, if the others come."""
        while self.waits.any:
            self.look()
            time.sleep(POLL)
        self.look_away()

    def _lift_limit(self, group: Any) -> None:
        """Lifts the limits of NCCL, and those of gloo's waits that the heartbeat keeps."""
        if group is None:
            return
        if self.enqueues:
            set_group_timeout(group, self.device, _NEVER)
        if self.everyone.heartbeat is not None:
            set_group_timeout(group, torch.device("cpu"), _NEVER)

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
        """Runs `small` on a small tensor of many ranks, and else the backend's operation."""
        if self.size > 1 and tensor.numel():
            self._check_groups()
            host = tensor.cpu() if self.staged else tensor
            if host.is_cpu and self.size > FEW and host.nbytes <= MOST:
                with self.waiting(None, what, self.group):
                    small(self._tree, host)
            else:
                with self.waiting(None, what, self.process_group or self.group):
                    dist.all_reduce(host, operation, group=self.process_group)
            if host is not tensor:
                tensor.copy_(host)
        return tensor

    @property
    def _tree(self) -> Tree:
        assert self.group is not None
        ranks = self.subgroups[self.subgroup] if self.subgroups else range(self.size)
        # One thread may sum over a view while another one sums over everyone.
        tag = TAG_SUMS + bool(self.subgroups)
        return Tree(self.group, ranks, self.rank, tag, self.limit)

    def exchange(
        self, parts: Sequence[Sequence[Tensor]], sizes: Sequence[int], what: str
    ) -> list[Tensor]:
        """Sends tensors to every rank, and receives a tensor from every rank.

        Args:
            parts: Tensors for each rank. Flat tensors of one type, at least one.
            sizes: Number of elements that each rank sends here.
        """
        if self.size == 1:
            return [torch.cat(list(parts[0]))]
        self._check_groups()
        sent = torch.cat([tensor for part in parts for tensor in part])
        sent = sent.cpu() if self.staged else sent
        out = sent.new_empty(sum(sizes))
        with self.waiting(None, what, self.process_group or self.group):
            dist.all_to_all_single(
                out,
                sent,
                list(sizes),
                [sum(tensor.numel() for tensor in part) for part in parts],
                group=self.process_group,
            )
        return list(out.to(parts[0][0].device).split(list(sizes)))

    def barrier(self, what: str) -> None:
        """Waits until all ranks of all replicas are here."""
        self.everyone.sum(torch.zeros(1), what)

    # -- failures ----------------------------------------------------------------------------------

    def fail(
        self,
        error: RuntimeError,
        peers: Sequence[int] | None,
        what: str,
        wait: Wait | None = None,
    ) -> NoReturn:
        """Turns a backend's exception into one line that names who waits for whom."""
        text, me = first_line(error), self.describe_rank(self.rank)
        if LATE.search(text):
            raise self.late(peers, what, wait) from error
        others = range(self.size) if peers is None else peers
        keys = [f"interrupted/{self.global_rank(rank)}" for rank in others]
        interrupted = [others[at] for at in find_present(self.store, keys)]
        if interrupted:
            who = self.name_ranks(interrupted)
            raise RankDied(f"{me} ends, because {who} was interrupted") from error
        self._raise_peer_error(others, error)
        whom = self.name_ranks(peers) if peers else "a peer"
        raise RankDied(f"{me} lost {whom} while waiting for {what} ({reason(error)})") from error

    def _check_groups(self) -> None:
        if self.size > 1 and self.group is None:
            lost = self.everyone.lost
            raise RunError(
                "the world of these ranks is closed"
                if lost is None
                else f"the ranks cannot go on after an error ({lost}); start them anew, and resume "
                "from a checkpoint"
            )

    def _raise_peer_error(self, others: Sequence[int], error: RuntimeError | None) -> None:
        """Raises the error of a rank that has given up, if there is one among others."""
        keys = [f"gave up/{self.global_rank(rank)}" for rank in others]
        for at in find_present(self.store, keys):
            given_up = json.loads(self.store.get(keys[at]))
            self.everyone.peer_error = given_up["text"]
            kinds = {"input": InputError, "lost": RankDied, "final": RankDied}
            raised = kinds.get(given_up["kind"], PeerFailed)(given_up["text"])
            if isinstance(raised, RankDied):
                raised.is_fault = given_up["kind"] == "lost"
            raise raised from error

    def late(self, peers: Sequence[int] | None, what: str, wait: Wait | None = None) -> WaitTimeout:
        """Returns the error of a wait for peers. None means some of all others."""
        everyone = self.everyone
        wait = wait or Wait(None, self, peers, what)
        if everyone.heartbeat is None:
            ranks = [] if peers is None else wait.ranks
            verdict = Verdict(wait, ranks, self.timeout, None, "")
        else:
            verdict = everyone.heartbeat.late(wait)
        me, what = everyone.describe_rank(everyone.rank), verdict.wait.what
        if verdict.key == ENDED:
            return WaitTimeout(f"{me} waits no longer for {what}: {verdict.said}")
        limit = verdict.wait.world.timeout
        seconds = limit if verdict.seconds < 2 * limit else round(verdict.seconds)
        others = everyone.name_ranks(verdict.ranks)
        waited = f"{me} waited {seconds:g} s for {others}: {what}"
        key = verdict.key or ("timeout" if everyone.after_setup is None else "work_timeout")
        said = f"; {verdict.said}" if verdict.said else ""
        return WaitTimeout(
            f"{waited}{said}; where it only takes longer, raise parallel.{key}", verdict.ranks
        )
