"""The key-value store through which ranks meet, with a limit for every wait."""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import re
import secrets
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist

from dynmo.errors import ConfigError, RankDied, RunError, WaitTimeout, one_line
from dynmo.files import write_whole
from dynmo.runtime.comm.rendezvous import ALONE, Rendezvous, is_loopback, read_rendezvous
from dynmo.runtime.comm.signed_store import SignedStore
from dynmo.runtime.comm.waits import call_with_limit, first_line

# Seconds that a wait may take beyond `parallel.timeout`, its own limit.
SLACK = 2.0
# Seconds between two looks for the address of the launcher.
_POLL = 0.05
# A store in a file that something else has written to raises these.
LOST = (RuntimeError, ValueError, MemoryError)
# Bytes of the length of a key or a value in a file store.
_LENGTH = 4
# Key of a generation whose ranks have met anew without one of them.
ENDED = "ended"
# The store of each place, and the number of worlds that this process has met in before.
_opened: dict[Rendezvous, tuple[SignedStore, int]] = {}
# Name of the file with the token of ranks that torchrun started on one machine.
_TOKEN_FILE = "dynmo-token-"


def open_store(rendezvous: Rendezvous, timeout: float) -> SignedStore:
    """Opens the key-value store through which the ranks of `rendezvous` meet.

    It stays open, since rank 0 may serve it. The same processes may open it again, all of them
    equally often, and then get another part of it.

    Raises:
        RunError: No store can be made.
        WaitTimeout: The store of rank 0 does not answer.
    """
    if rendezvous == ALONE:
        return SignedStore(dist.HashStore())
    if rendezvous not in _opened:
        _opened[rendezvous] = _open(rendezvous, timeout), 0
        return _opened[rendezvous][0]
    store, number = _opened[rendezvous]
    _opened[rendezvous] = store, number + 1
    store.set_timeout(timedelta(seconds=timeout))
    return store.within(_world(number + 1))


def _world(number: int) -> str:
    return f"world/{number}"


def _open(rendezvous: Rendezvous, timeout: float) -> SignedStore:
    if rendezvous.folder is not None:
        store = dist.FileStore(str(Path(rendezvous.folder) / "store"), rendezvous.size)
        store.set_timeout(timedelta(seconds=timeout))
        # Only this user can read the folder, so the store itself can tell the token.
        token = store.compare_set("token", "", secrets.token_hex())
        return SignedStore(store, bytes(token))
    if rendezvous.file is not None:
        return _meet(rendezvous, Path(rendezvous.file), timeout)
    where = f"{rendezvous.address}:{rendezvous.port}"
    try:
        store = _within_limit(timeout, lambda: _join_launcher(rendezvous, timeout))
    except TimeoutError:
        raise WaitTimeout(
            f"rank {rendezvous.rank} waited {timeout:g} s for the store of rank 0 at {where}: "
            "what listens there does not answer; choose another MASTER_PORT",
            [0],
        ) from None
    except (OSError, RuntimeError, ValueError) as error:
        me, why = f"rank {rendezvous.rank}", first_line(error)
        raise RunError(f"{me} could not meet the others at {where}: {why}") from None
    # torchrun's store outlives the ranks that it restarts. Their keys must not be read again.
    attempt = dist.PrefixStore(_attempt(), store)
    is_local = rendezvous.loopback or rendezvous.local
    token = token_of(attempt, rendezvous.rank, is_local, timeout)
    return SignedStore(store, token).within(_attempt())


def token_of(store: dist.Store, rank: int, is_local: bool, timeout: float) -> bytes:
    """Returns the token that the ranks of a run share, if others can reach their store.

    The user gives it to all ranks as DYNMO_TOKEN. Without one, ranks on one machine take that of
    a file that only this user can read. Ranks on several machines then have none.

    Args:
        store: A store of these ranks alone. It tells the name of the file, which is no secret.
        rank: This rank's number. Rank 0 makes the file.
        is_local: Whether all ranks are on one machine.
        timeout: Seconds to wait for rank 0.
    """
    given = os.environ.get("DYNMO_TOKEN", "").strip()  # a secret of a file may end its line
    if not given.isprintable():
        raise ConfigError("DYNMO_TOKEN has characters that cannot be printed; take letters")
    if given or not is_local:
        return given.encode()
    if rank == 0:
        token = secrets.token_hex().encode()
        with tempfile.NamedTemporaryFile(prefix=_TOKEN_FILE, delete=False) as file:
            file.write(token)
        path = Path(file.name)
        atexit.register(path.unlink, missing_ok=True)
        store.set("token", path.name)
        return token
    try:
        store.wait(["token"], timedelta(seconds=timeout))
        name = store.get("token").decode(errors="replace")
        path = Path(tempfile.gettempdir(), name)
        is_name = re.fullmatch(_TOKEN_FILE + r"\w+", name) is not None
        if not is_name or path.is_symlink() or path.stat().st_uid != os.geteuid():
            raise OSError(f"{one_line(str(path)[:80])} is no file of its rank 0")
        return path.read_bytes()
    except RuntimeError:
        late = f"rank {rank} waited {timeout:g} s for rank 0 to join"
        raise WaitTimeout(f"{late}; started with too few ranks?", [0]) from None
    except OSError as error:
        raise RunError(
            f"rank {rank} cannot read the token of this run ({error}); set DYNMO_TOKEN to one "
            "secret on all ranks"
        ) from None


def _attempt() -> str:
    # On several machines torchrun's agents count apart. Then rank 0 serves a store of its own.
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "False") != "True":
        return "attempt/0"
    return f"attempt/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def rendezvous_record(rendezvous: Rendezvous) -> dict[str, Any]:
    """Returns what a process that joins the run needs to open the same store.

    Raises:
        RunError: No other process can reach the store.
    """
    store, number = _opened.get(rendezvous, (None, 0))
    prefixes = [_world(number)] if number else []
    where: dict[str, Any]
    if rendezvous.folder is not None:
        where = {"folder": rendezvous.folder}
    elif rendezvous.file is not None:
        where = read_rendezvous(Path(rendezvous.file))
    elif rendezvous.address is not None:
        where = {"address": rendezvous.address, "port": rendezvous.port}
        if store is not None and store.token:
            where["token"] = store.token.decode()
        prefixes = [_attempt(), *prefixes]
    else:
        raise RunError(
            "this run has one rank that no launcher started: no other process can join it"
        )
    return where | ({"prefix": "/".join(prefixes)} if prefixes else {})


def open_rendezvous(record: Mapping[str, Any], timeout: float) -> SignedStore:
    """Opens the store of a run that goes on, by its `rendezvous_record`.

    Raises:
        RunError: The run has ended, or cannot be reached.
    """
    store = _open_record(record, timeout)
    return store.within(record["prefix"]) if "prefix" in record else store


def _open_record(record: Mapping[str, Any], timeout: float) -> SignedStore:
    if "folder" in record:
        _stay_on_loopback("localhost")  # as the ranks do
        path = Path(record["folder"]) / "store"
        with _said_of(f"in {path.parent}", timeout):
            # The lock of a process that was stopped may keep it closed.
            store = call_with_limit(timeout, lambda: _file_store(path))
        store.set_timeout(timedelta(seconds=timeout))
        return store
    ends = record["address"], record["port"]
    with _said_of(f"at {ends[0]}:{ends[1]}", timeout):
        # A store asks again and again. A plain connection says at once that nobody listens.
        call_with_limit(timeout, lambda: socket.create_connection(ends, timeout).close())
        tcp = _within_limit(timeout, lambda: _tcp_store(*ends, timeout))
    _stay_on_loopback(record["address"])
    return SignedStore(tcp, record.get("token", "").encode())


@contextmanager
def _said_of(where: str, timeout: float) -> Iterator[None]:
    """Says of which run a store cannot be opened."""
    try:
        yield
    except (ConnectionRefusedError, FileNotFoundError):
        raise RunError(f"the run that met {where} is not running any more") from None
    except TimeoutError:
        late = f"waited {timeout:g} s for the store of the run {where}, which does not answer"
        raise WaitTimeout(late, [0]) from None
    except (OSError, RuntimeError, ValueError) as error:
        raise RunError(f"the run {where} cannot be reached: {first_line(error)}") from None


def _file_store(path: Path) -> SignedStore:
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        _check_file(file)
    store = dist.FileStore(str(path), -1)
    return SignedStore(store, store.get("token") if store.check(["token"]) else b"")


def _check_file(file: IO[bytes]) -> None:
    """Raises ValueError if a file is no store: keys and values behind their lengths.

    torch would wait for the rest of it without an end.
    """
    size = os.fstat(file.fileno()).st_size
    while (at := file.tell()) < size:
        length = int.from_bytes(file.read(_LENGTH), sys.byteorder)
        file.seek(at + _LENGTH + length)
    if not size or file.tell() != size:
        raise ValueError(f"{file.name} is not the store of a run")


def _tcp_store(
    address: str, port: int, timeout: float, serves: bool = False, listener: int | None = None
) -> dist.TCPStore:
    return dist.TCPStore(
        address,
        port,
        is_master=serves,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,  # `Meeting.join` waits, and names those that are absent
        multi_tenant=True,
        master_listen_fd=listener,
    )


def _stay_on_loopback(address: str) -> None:
    """Keeps gloo's connections on the loopback if the store is there."""
    if is_loopback(address) and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _meet(rendezvous: Rendezvous, file: Path, timeout: float) -> SignedStore:
    """Opens the launcher's store. Waits for the file with its address."""
    end = time.monotonic() + timeout
    # A listing shows a new file of another machine at once. A network file system may keep the
    # answer that one file does not exist.
    while file.name not in (path.name for path in file.parent.iterdir()):
        if time.monotonic() >= end:
            late = f"rank {rendezvous.rank} waited {timeout:g} s for the launcher"
            raise WaitTimeout(f"{late}, which has not written its address to {file}")
        time.sleep(_POLL)
    try:
        return open_rendezvous(rendezvous_record(rendezvous), timeout)
    except WaitTimeout as error:
        raise WaitTimeout(f"rank {rendezvous.rank} {error}") from None
    except RunError as error:
        raise RankDied(f"rank {rendezvous.rank} lost the launcher as it joined ({error})") from None


def home_of(store: SignedStore) -> SignedStore:
    """Returns the part of a store in which the first generation of ranks meets."""
    return store.within("gen/0")


def serve(file: Path, timeout: float, address: str | None = None) -> SignedStore:
    """Opens a store in the launcher, and writes its address to a file.

    Args:
        address: Where it listens. None: MASTER_ADDR, or the name of this machine.

    Raises:
        RunError: The ranks could not reach it.
    """
    address = address or os.environ.get("MASTER_ADDR") or socket.gethostname()
    port, listener = 0, None
    try:
        if is_loopback(address):
            # The store would listen on every interface.
            with socket.create_server((address, 0)) as server:
                port, listener = server.getsockname()[1], server.detach()
        store = _within_limit(timeout, lambda: _tcp_store(address, port, timeout, True, listener))
    except (OSError, RuntimeError, ValueError, TimeoutError) as error:
        why = first_line(error) or f"no connection within {timeout:g} s"
        advice = "set MASTER_ADDR to an address of its machine that the ranks reach"
        what = f"the launcher could not open a store at {address}"
        raise RunError(f"{what}: {why}; {advice}") from None
    _stay_on_loopback(address)
    record = {"address": address, "port": store.port, "token": secrets.token_hex()}
    write_whole(file, json.dumps(record), mode=0o600)
    return SignedStore(store, record["token"].encode())


def _join_launcher(rendezvous: Rendezvous, timeout: float) -> dist.TCPStore:
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
    return _tcp_store(rendezvous.address, rendezvous.port, timeout, serve, listener)


def _resolve(address: str, timeout: float) -> None:
    """Waits until a host has an address: it may be starting, too.

    Raises OSError if it gets none. TCPStore would go on asking well beyond its limit.
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


def _within_limit(timeout: float, open_tcp: Callable[[], dist.TCPStore]) -> dist.TCPStore:
    with _native_stderr_dropped():
        return call_with_limit(timeout + SLACK, open_tcp)


@contextmanager
def _native_stderr_dropped() -> Iterator[None]:
    """Drops some 40 lines that torch's C++ writes about every connection that fails."""
    if os.environ.get("DYNMO_TRACEBACK") == "1":
        yield
        return
    stderr, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(null)


def no_answer(seconds: float) -> WaitTimeout:
    late = f"waited {seconds:g} s for the store of the run, which does not answer"
    return WaitTimeout(f"{late}; has something else written to it?", [0])


def find_missing(store: dist.Store, keys: Sequence[str]) -> list[int]:
    """Returns the positions of keys that are not in the store. Empty without an answer.

    One request says that a whole range of keys is there.
    """

    def ask(low: int, high: int) -> list[int]:
        if low == high or store.check(list(keys[low:high])):
            return []
        if high - low == 1:
            return [low]
        middle = (low + high) // 2
        return ask(low, middle) + ask(middle, high)

    return _answer(lambda: ask(0, len(keys)))


def find_present(store: SignedStore, keys: Sequence[str]) -> list[int]:
    """Returns the positions of keys that the run has written. Empty without an answer."""
    return _answer(lambda: [at for at, key in enumerate(keys) if store.holds(key)])


def _answer(ask: Callable[[], list[int]]) -> list[int]:
    try:
        return call_with_limit(SLACK, ask)
    except (RuntimeError, TimeoutError):  # the rank that serves it is gone, or hangs
        return []
