"""The ranks that train together: one generation of process groups, passed explicitly.

A generation is one `init_process_group` over a prefixed store (`gen/<k>`), so that a planned change of the world is milliseconds and no
restart. CPU tensors travel by gloo; CUDA tensors by NCCL, with a communicator per channel.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from dynmo.errors import RankDied, RunError, WaitTimeout
from dynmo.runtime.rendezvous import Rendezvous

# FileStore and gloo give no reason codes: the words of their messages are all there is to tell a late peer from a dead one.
_LATE = re.compile(r"timed? ?out|timeout", re.IGNORECASE)


def open_store(rendezvous: Rendezvous, timeout: float) -> dist.Store:
    """The key-value store through which the ranks of `rendezvous` meet. timeout: seconds."""
    limit = timedelta(seconds=timeout)
    if rendezvous.folder is not None:
        store: dist.Store = dist.FileStore(str(Path(rendezvous.folder) / "store"), rendezvous.size)
        store.set_timeout(limit)
        return store
    assert rendezvous.address is not None
    assert rendezvous.port is not None
    # torchrun's agent may already serve this port; otherwise rank 0 does.
    serve = rendezvous.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "False") != "True"
    try:
        # The store would listen on every interface. Where all ranks are on this machine, nobody else needs to reach it.
        listener = None
        if serve and rendezvous.loopback:
            listener = socket.create_server((rendezvous.address, rendezvous.port)).detach()
        return dist.TCPStore(
            rendezvous.address,
            rendezvous.port,
            rendezvous.size,
            serve,
            timeout=limit,
            multi_tenant=True,
            master_listen_fd=listener,
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise RunError(
            f"rank {rendezvous.rank} could not meet the others at {rendezvous.address}:{rendezvous.port}: {first_line(error)}"
        ) from None


def first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]


@dataclass
class World:
    """One generation of ranks. `device` is where this rank computes; `timeout` (seconds) bounds every wait."""

    rank: int
    size: int
    device: torch.device
    timeout: float
    generation: int
    store: dist.Store
    # Where messages travel that have no communicator of their own; None in a world of one rank that needs no messages.
    group: dist.ProcessGroup | None = None
    channels: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet[Any])
    _channel_groups: dict[tuple[int, ...], Any] = field(default_factory=dict[tuple[int, ...], Any])

    @classmethod
    def join(
        cls, store: dist.Store, rank: int, size: int, *, device: torch.device | None = None, timeout: float = 120.0, generation: int = 0
    ) -> World:
        """Meets the other ranks of this generation. Raises WaitTimeout naming those that did not come."""
        device = device or torch.device("cpu")
        prefixed = dist.PrefixStore(f"gen/{generation}", store)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        try:
            prefixed.set(f"here/{rank}", "1")
            dist.init_process_group(backend, store=prefixed, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
        except RuntimeError as error:
            absent = _absent(prefixed, size)
            if absent:
                raise WaitTimeout(
                    f"rank {rank} waited {timeout:g} s for {_ranks(absent)} to join; started with too few ranks?", absent
                ) from None
            # All came, and one is gone again.
            raise RankDied(f"rank {rank} could not form a group of {size}: {_reason(error)}") from None
        return cls(rank, size, device, timeout, generation, prefixed, dist.group.WORLD)

    def close(self) -> None:
        # Their threads must not be inside the backend when it goes.
        for channels in list(self.channels):
            channels.close()
        self.group = None  # the group ends, and its peers are told, when the last reference to it goes
        if dist.is_initialized():
            dist.destroy_process_group()

    # -- point to point ---------------------------------------------------------------------------------------------------

    def open_channels(self, pairs: Sequence[tuple[int, ...]]) -> None:
        """NCCL: one communicator per channel key (..., source, target), in the same order on all ranks. gloo needs none: it has tags."""
        if self.device.type != "cuda":
            return
        for key in pairs:
            if key not in self._channel_groups:
                self._channel_groups[key] = dist.new_group(ranks=sorted(set(key[-2:])), backend="nccl")

    def send(self, tensor: Tensor, target: int, tag: int, key: tuple[int, ...] | None = None) -> dist.Work:
        group = self._channel_groups.get(key) if key is not None and tensor.is_cuda else None
        assert self.group is not None
        try:
            # dist.isend looks up the group and checks the tensor anew: on a small message that is half of the time it takes.
            work = dist.isend(tensor, target, group=group) if group else self.group.send([tensor], target, tag)
        except RuntimeError as error:
            self.fail(error, [target], "room for a message")
        assert work is not None
        return work

    def receive(self, tensor: Tensor, source: int, tag: int, key: tuple[int, ...] | None = None) -> dist.Work:
        group = self._channel_groups.get(key) if key is not None and tensor.is_cuda else None
        assert self.group is not None
        try:
            work = dist.irecv(tensor, source, group=group) if group else self.group.recv([tensor], source, tag)
        except RuntimeError as error:
            self.fail(error, [source], "a message")
        assert work is not None
        return work

    def wait(self, work: dist.Work, peer: int, what: str) -> None:
        """Waits for a message; `what` is said when it does not come: `the activations of microbatch 3`."""
        try:
            work.wait()
        except RuntimeError as error:
            self.fail(error, [peer], what)

    # -- collectives: fixed-schema tensors, never objects ---------------------------------------------------------------------

    def sum(self, tensor: Tensor, what: str) -> Tensor:
        """All-reduce in place. Used on vectors where one rank alone has a nonzero entry, so the order of the sum cannot matter."""
        if self.size > 1:
            try:
                dist.all_reduce(tensor)
            except RuntimeError as error:
                self.fail(error, None, what)
        return tensor

    def barrier(self, what: str) -> None:
        self.sum(torch.zeros(1), what)

    def agree(self, digest: bytes | None, what: str) -> None:
        """Every rank must have computed the same plan: compares a hash of it (None: this rank has no part).

        Raises RunError on all ranks, those without a part too, so that none goes on to wait for the others.
        """
        table = torch.zeros(self.size, dtype=torch.int64)
        table[self.rank] = 0 if digest is None else 1 + int.from_bytes(digest[:7])
        self.sum(table, what)
        said = {r: value for r, value in enumerate(table.tolist()) if value}
        if len(set(said.values())) > 1:
            first = min(said)
            other = [r for r, value in said.items() if value != said[first]]
            raise RunError(f"rank {first} and {_ranks(other)} disagree on {what}; do all run the same dynmo, config and data?")

    # -- failures ---------------------------------------------------------------------------------------------------------

    def fail(self, error: RuntimeError, peers: Sequence[int] | None, what: str) -> NoReturn:
        """Turns a backend's exception into one line that names who waits for whom."""
        text = first_line(error)
        if _LATE.search(text):
            late = self._not_waiting(what) if peers is None else list(peers)
            raise WaitTimeout(f"rank {self.rank} waited {self.timeout:g} s for {_ranks(late)}: {what}", late) from error
        whom = _ranks(list(peers)) if peers else "a peer"
        raise RankDied(f"rank {self.rank} lost {whom} while waiting for {what} ({_reason(error)})") from error

    def _not_waiting(self, what: str) -> list[int]:
        """Who is not in this collective: every rank that gives up says so in the store; those that do not are the ones waited for."""
        try:
            self.store.set(f"waiting/{self.rank}", json.dumps({"host": socket.gethostname(), "what": what}))
            time.sleep(min(1.0, self.timeout / 2))
            return [r for r in range(self.size) if r != self.rank and not self.store.check([f"waiting/{r}"])]
        except RuntimeError:
            return []


def _absent(store: dist.Store, size: int) -> list[int]:
    try:
        return [r for r in range(size) if not store.check([f"here/{r}"])]
    except RuntimeError:  # the store's own rank is gone
        return []


def _reason(error: RuntimeError) -> str:
    """What a backend says, without the place in its sources before and the advice after."""
    return re.sub(r"^\[\S*\] ", "", first_line(error)).split(". ")[0]


def _ranks(ranks: list[int]) -> str:
    if not ranks:
        return "the other ranks"
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
