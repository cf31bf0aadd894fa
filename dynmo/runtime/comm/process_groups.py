"""Forms torch's process groups. Ranks that do not come are named, and strangers are dropped.

gloo takes whoever says a small number for a rank. So each pair of ranks proves over a new
connection that both know the run's token. Nothing else goes over it before this:

    rank 0    nonce a                            ->    rank 1
    rank 0                            nonce b    <-    rank 1
    rank 0    hash(token, "0 to 1", a, b)        ->    rank 1
    rank 0    hash(token, "1 to 0", b, a)        <-    rank 1

The hash covers the group's name and generation, too, so that none can be used twice.
"""

from __future__ import annotations

import contextlib
import hmac
import importlib
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dynmo.errors import RankDied, RunError, WaitTimeout
from dynmo.kernels.torch_private import restart_group_names
from dynmo.runtime.comm.signed_store import SignedStore
from dynmo.runtime.comm.store import SLACK, find_missing
from dynmo.runtime.comm.waits import LATE, call_with_limit, first_line, ranks_text, reason

_logger = logging.getLogger(__name__)

# Seconds between two looks whether a wait is over.
_LOOK = 0.01
# Bytes of a nonce, and of a hash.
_SIZE = 32
_NONCES, _HASHES = 0, 1  # tags of the messages
# Most seconds for the proofs of a group, and most times that a group is made.
PATIENCE, TRIES = 10.0, 10


def form_default_group(
    store: SignedStore,
    rank: int,
    size: int,
    *,
    enqueues: bool,
    timeout: float,
    join_timeout: float,
    is_over: Callable[[], bool] | None = None,
) -> Any:
    """Makes torch's default group of the ranks that meet in a store.

    Args:
        enqueues: Whether NCCL carries tensors on CUDA.
        timeout: Limit of every wait, in seconds.
        join_timeout: Seconds to wait for the other ranks to come.
        is_over: Whether another rank has told that some will not come.
    """
    # torch._dynamo imports it. Its functions have the default group of that moment as a default
    # argument, and a group that somebody holds does not end: its threads would outlive Python.
    importlib.import_module("torch.distributed.nn.functional")

    def make(place: SignedStore) -> Any:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if enqueues else "gloo",
            # NCCL's threads use the store while Python ends, and must not call Python then.
            store=place.unsigned if enqueues else place,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout),
        )
        return dist.group.WORLD

    claim(store, rank, join_timeout)
    _await_all(
        store,
        rank,
        size,
        min(join_timeout, timeout),
        "to join; started with too few ranks?",
        is_over,
    )
    return _form(store, rank, size, make, leave_default_group, timeout, is_over)


def form_group_within(
    store: SignedStore, ranks: Sequence[int], *, enqueues: bool, timeout: float
) -> Any:
    """Makes a group within a program's own process groups. Only these ranks call it."""
    rank, size = ranks.index(dist.get_rank()), len(ranks)
    backend = "cpu:gloo,cuda:nccl" if enqueues else "gloo"
    dropped = list[Any]()

    def make(place: SignedStore) -> Any:
        dropped.append(None)
        dropped[-1] = new_group(ranks, timeout, backend, size)
        return dropped[-1]

    claim(store, rank, timeout)
    what = f"to call dynmo.init as one of ranks {', '.join(map(str, ranks))} of the process group"
    _await_all(store, rank, size, timeout, what)
    # The name of a group counts those that there are, so none ends before there is a good one.
    group = _form(store, rank, size, make, lambda: None, timeout)
    for each in dropped[:-1]:
        drop_group(each)
    return group


def claim(store: SignedStore, rank: int, timeout: float) -> None:
    """Says in the store that this rank is here."""
    try:
        is_first = call_with_limit(timeout + SLACK, lambda: store.claim(f"here/{rank}"))
    except TimeoutError:
        late = f"rank {rank} waited {timeout:g} s for the store of rank 0, which does not answer"
        raise WaitTimeout(late, [0]) from None
    except RuntimeError as error:
        why = reason(error)
        raise RankDied(f"rank {rank} lost the store of rank 0 as it joined ({why})") from None
    if not is_first:
        advice = "give each process a RANK of its own, and each run a MASTER_PORT of its own"
        raise RunError(f"another process is rank {rank} of this run, too; {advice}")


def await_all(
    store: SignedStore,
    what: str,
    size: int,
    timeout: float,
    is_over: Callable[[], bool] | None = None,
) -> None:
    """Waits until all ranks have called it. A rank makes few short requests.

    Args:
        is_over: Asked now and then. True ends the wait like its limit.
    """
    if store.add(f"{what}/count", 1) == size:
        store.set(f"{what}/all", "1")
    end = time.monotonic() + timeout
    while is_over is not None and not store.check([f"{what}/all"]):
        if time.monotonic() >= end or is_over():
            raise RuntimeError("timeout")
        time.sleep(_LOOK)
    store.wait([f"{what}/all"], timedelta(seconds=timeout))


def _await_all(
    store: SignedStore,
    rank: int,
    size: int,
    seconds: float,
    what: str,
    is_over: Callable[[], bool] | None = None,
) -> None:
    """Waits until all ranks are here."""
    try:
        await_all(store, "here", size, seconds, is_over)
    except RuntimeError as error:
        absent = find_missing(store, [f"here/{other}" for other in range(size)])
        if absent or LATE.search(first_line(error)):
            late = f"rank {rank} waited {seconds:g} s for {ranks_text(absent)} {what}"
            raise WaitTimeout(late, absent) from None
        raise RankDied(f"rank {rank} lost the store of the run ({reason(error)})") from None


def _form(
    store: SignedStore,
    rank: int,
    size: int,
    make: Callable[[SignedStore], Any],
    drop: Callable[[], None],
    timeout: float,
    is_over: Callable[[], bool] | None = None,
) -> Any:
    """Makes a group until all its connections are proven.

    Args:
        make: Makes the group by a part of the store that names its generation.
        drop: Ends what it has made.
    """
    if size == 1:
        return make(store)
    trouble = ""
    for number in range(TRIES):
        place, group, trouble = store.within(f"try/{number}"), None, ""
        try:
            group = make(place)
            prove(group, rank, size, place, timeout)
        except RuntimeError as error:
            trouble, group = reason(error), None
            drop()
        try:
            trouble = _agree_on(place, rank, size, trouble, timeout, is_over)
        except RuntimeError as error:
            group = None
            drop()
            if isinstance(error, RunError):
                raise
            why = trouble or reason(error)
            absent = find_missing(place, [f"proved/{other}" for other in range(size)])
            if absent:
                late = f"rank {rank} waited in vain for {ranks_text(absent)} to form a group"
                raise WaitTimeout(f"{late} of {size} ({why})", absent) from None
            raise RankDied(f"rank {rank} could not form a group of {size}: {why}") from None
        if not trouble:
            return group
        group = None
        drop()
        if rank == 0:
            _logger.warning(f"{trouble}; the ranks drop their connections and meet again")
    raise RunError(
        f"rank {rank} could not form a group of {size} in {TRIES} tries: {trouble}; keep other "
        "processes from the ports of this run"
    )


def _agree_on(
    place: SignedStore,
    rank: int,
    size: int,
    trouble: str,
    timeout: float,
    is_over: Callable[[], bool] | None = None,
) -> str:
    """Returns the trouble of one of the ranks. Empty if all connections are proven.

    A rank that fails at once and leaves would break the connections that others are still making.
    So all wait for all here.
    """
    if "token" in trouble:
        place.set("trouble", trouble)
    elif trouble:  # a consequence, perhaps
        place.compare_set("trouble", "", trouble)
    limit = min(timeout, 2 * PATIENCE) if trouble else timeout
    place.set(f"proved/{rank}", "1")
    await_all(place, "proved", size, limit, is_over)
    with contextlib.suppress(RuntimeError):  # the rank that serves the store is gone
        return (place.find("trouble") or b"").decode()
    return ""


def try_groups(
    store: SignedStore,
    keys: Sequence[tuple[int, ...]],
    rank: int,
    timeout: float,
    make: Callable[[Sequence[int]], Any],
) -> tuple[dict[tuple[int, ...], Any], str]:
    """Makes groups of some ranks, once. All ranks make all of them, in one order.

    Args:
        store: The part of the store whose prefix names this try.
        keys: Whether the group is a second one of its ranks, and the global ranks.
        rank: This rank's global number.
        make: Makes the group of some global ranks.

    Returns:
        The group of each key, or None if this rank is not in it. Then what went wrong, or nothing.
    """
    made, trouble = dict[tuple[int, ...], Any](), ""
    for key in keys:
        members, made[key] = key[1:], None
        try:
            group = make(members)
            if rank in members:
                made[key] = group
                place = store.within("-".join(map(str, key)))
                prove(group, members.index(rank), len(members), place, timeout)
        except RuntimeError as error:
            if LATE.search(first_line(error)) and not isinstance(error, Unproven):
                raise
            trouble = reason(error)
            drop_group(made.pop(key))
    return made, trouble


def new_group(ranks: Sequence[int], timeout: float, backend: str | None, callers: int) -> Any:
    # torch names a group by a count that all ranks share. Or it takes the group's ranks and a count
    # of this rank's groups.
    own_name = callers < dist.get_world_size()
    return dist.new_group(
        list(ranks), timedelta(seconds=timeout), backend, use_local_synchronization=own_name
    )


def drop_group(group: Any) -> None:
    """Ends a group that `new_group` has made. None is a group of other ranks."""
    if group is not None:
        dist.destroy_process_group(group)


def leave_default_group() -> None:
    """Ends the default group, if there is one.

    torch names groups by a count, which must be the same on all ranks when they meet again. The
    count does not start anew when a group could not be formed.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    restart_group_names()


class Unproven(RunError):
    """The other end of a connection is no rank of this run, or is gone."""


def prove(group: Any, rank: int, size: int, store: SignedStore, timeout: float) -> None:
    """Exchanges proofs with every other rank of a new group of gloo.

    Args:
        rank: This rank's number in the group.
        size: Number of the group's ranks.
        store: The part of the store whose prefix names the group and its generation.
        timeout: Limit of every wait, in seconds.

    Raises:
        Unproven: A connection does not lead to the rank. The group must not be used.
    """
    peers = [peer for peer in range(size) if peer != rank]
    end = time.monotonic() + min(timeout, PATIENCE)

    def swap(sent: dict[int, bytes], tag: int) -> dict[int, bytes]:
        heard = {peer: torch.empty(_SIZE, dtype=torch.uint8) for peer in peers}
        said = {peer: torch.frombuffer(bytearray(sent[peer]), dtype=torch.uint8) for peer in peers}
        works, at = list[tuple[int, Any]](), rank
        try:
            for at in peers:
                works.append((at, group.recv([heard[at]], at, tag)))
            for at in peers:
                works.append((at, group.send([said[at]], at, tag)))
            for peer, work in works:
                at = peer
                work.wait(timedelta(seconds=max(0.001, end - time.monotonic())))
        except RuntimeError as error:
            why = reason(error)
            raise Unproven(
                f"rank {rank} got no proof from what should be rank {at} ({why})"
            ) from None
        return {peer: _bytes_of(heard[peer]) for peer in peers}

    nonce = secrets.token_bytes(_SIZE)
    nonces = swap(dict.fromkeys(peers, nonce), _NONCES)

    def hash_of(source: int, target: int, nonces: bytes) -> bytes:
        return store.keyed_hash(f"{source} to {target} of {size}", b"proof", nonces)

    hashes = swap({peer: hash_of(rank, peer, nonce + nonces[peer]) for peer in peers}, _HASHES)
    for peer in peers:
        if not hmac.compare_digest(hashes[peer], hash_of(peer, rank, nonces[peer] + nonce)):
            raise Unproven(
                f"what answered rank {rank} for rank {peer} does not know the run's token"
            )


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()
