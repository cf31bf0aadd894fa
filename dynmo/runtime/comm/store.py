"""The key-value store through which ranks meet, with a limit for every wait."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from dynmo.errors import RankDied, RunError, WaitTimeout
from dynmo.runtime.comm.deadline import call_with_limit
from dynmo.runtime.comm.messages import first_line, reason
from dynmo.runtime.comm.rendezvous import ALONE, Rendezvous

# How many seconds longer than `parallel.timeout` a wait may take whose own limit that is.
_SLACK = 2.0


def open_store(rendezvous: Rendezvous | None, timeout: float) -> dist.Store:
    """The key-value store through which the ranks of `rendezvous` meet. timeout: seconds. Raises
    RunError for None, which is what `from_environment` finds where no launcher started this
    process, and where no store can be made."""
    if rendezvous is None:
        raise RunError(
            "this process was started alone, in no world of ranks: start it with torchrun, or take a world of one rank, "
            "`from_environment() or ALONE` (dynmo.runtime.comm.rendezvous)"
        )
    if rendezvous == ALONE:
        return dist.HashStore()
    if rendezvous.folder is not None:
        store: dist.Store = dist.FileStore(str(Path(rendezvous.folder) / "store"), rendezvous.size)
        store.set_timeout(timedelta(seconds=timeout))
        return store
    where = f"{rendezvous.address}:{rendezvous.port}"
    try:
        with _native_stderr_dropped():
            store = call_with_limit(timeout + _SLACK, lambda: _tcp_store(rendezvous, timeout))
    except TimeoutError:
        raise WaitTimeout(
            f"rank {rendezvous.rank} waited {timeout:g} s for the store of rank 0 at {where}: "
            "what listens there does not answer; choose another MASTER_PORT",
            [0],
        ) from None
    except (OSError, RuntimeError, ValueError) as error:
        me, why = f"rank {rendezvous.rank}", first_line(error)
        raise RunError(f"{me} could not meet the others at {where}: {why}") from None
    # torchrun's store outlives the ranks that it restarts: what those left there is not for these.
    return dist.PrefixStore(f"attempt/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _tcp_store(rendezvous: Rendezvous, timeout: float) -> dist.Store:
    assert rendezvous.address is not None
    assert rendezvous.port is not None
    _resolve(rendezvous.address, timeout)
    # torchrun's agent may already serve this port; otherwise rank 0 does.
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "False") == "True"
    serve = rendezvous.rank == 0 and not agent
    # The store would listen on every interface, which nobody needs if all ranks are here.
    listener = None
    if serve and rendezvous.loopback:
        listener = socket.create_server((rendezvous.address, rendezvous.port)).detach()
    return dist.TCPStore(
        rendezvous.address,
        rendezvous.port,
        rendezvous.size,
        serve,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,  # `World.join` waits, and names those that are absent
        multi_tenant=True,
        master_listen_fd=listener,
    )


def _resolve(address: str, timeout: float) -> None:
    """Waits until a host has an address: it may be starting, too. Raises OSError if it gets none.

    TCPStore would go on asking well beyond its limit.
    """
    end = time.monotonic() + timeout
    while True:
        try:
            socket.getaddrinfo(address, None)
        except OSError:
            if time.monotonic() >= end:
                raise
            time.sleep(min(0.5, timeout))
        else:
            return


@contextmanager
def _native_stderr_dropped() -> Iterator[None]:
    """While it is open, what torch's C++ writes to stderr is lost.

    It writes some 40 lines about every connection that fails. Our error is one line.
    """
    if os.environ.get("DYNMO_TRACEBACK") == "1":
        yield
        return
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)


def claim(store: dist.Store, rank: int, timeout: float) -> None:
    """Says in the store that this rank is here. Raises RunError if another process has said so."""
    try:
        claims = call_with_limit(timeout + _SLACK, lambda: store.add(f"here/{rank}", 1))
    except TimeoutError:
        late = f"rank {rank} waited {timeout:g} s for the store of rank 0, which does not answer"
        raise WaitTimeout(late, [0]) from None
    except RuntimeError as error:
        why = reason(error)
        raise RankDied(f"rank {rank} lost the store of rank 0 as it joined ({why})") from None
    if claims > 1:
        advice = "give each process a RANK of its own, and each run a MASTER_PORT of its own"
        raise RunError(f"another process is rank {rank} of this run, too; {advice}")


def find_missing(store: dist.Store, keys: Sequence[str]) -> list[int]:
    """Which of the keys are not in the store, by position. None if the store does not answer."""

    def ask() -> list[int]:
        return [at for at, key in enumerate(keys) if not store.check([key])]

    try:
        return call_with_limit(_SLACK, ask)
    except (RuntimeError, TimeoutError):  # the rank that serves it is gone, or hangs
        return []
