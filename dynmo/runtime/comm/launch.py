"""Starts the ranks of a run on this machine and looks after them: logs, signals, orphans, and one
line when it fails.

    dynmo train ── rank 0 ── (terminal: progress, result)  runs/<name>/rank-0.log (crashes)
             ├──── rank 1 ── runs/<name>/rank-1.log
             └──── rank 2 ── runs/<name>/rank-2.log

The ranks meet through a folder that only this user can read. Ctrl-C asks all ranks to stop after
the current step; a second one kills them. A rank that fails leaves its reason in the folder; the
others are ended and the cause, not its consequences, is reported.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from dynmo.errors import ConfigError, DynmoError, InputError, Interrupted, RankDied, RunError, WaitTimeout, place
from dynmo.files import write_whole

_logger = logging.getLogger(__name__)

# After one rank has failed, the others get so many seconds to find out for themselves and say why.
_GRACE = 3.0
_GRACE_WHEN_HUNG = 0.3
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)

# A receive that is posted is a kernel that turns until its message is there. A kernel that is
# loaded at its first launch may wait for the device to run dry, which such a one prevents; and
# streams that share a connection wait for each other. CUDA reads both as it starts.
FOR_RANKS_ON_CUDA = {"CUDA_MODULE_LOADING": "EAGER", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}


@dataclass(frozen=True)
class Failure:
    """Why a rank ended. weight: causes come before consequences (lower is closer to the cause).
    waits_for: ranks that did not come. trace: the traceback, for DYNMO_TRACEBACK=1."""

    weight: int
    status: int
    message: str
    waits_for: tuple[int, ...] = ()
    trace: str = ""


def most_local_ranks() -> int:
    """The number of ranks that one machine may start. A process of torch takes some 200 MB, and
    many ranks share a core poorly."""
    return max(64, 4 * (os.cpu_count() or 1))


def rank_environment(rank: int, size: int, folder: Path, threads: int) -> dict[str, str]:
    """The environment of one local rank.

    glibc would return each large block to the system when it is freed, and stashes are freed all
    the time; the page faults cost several percent. The MALLOC_ settings keep the memory (32 MiB is
    the largest threshold that glibc takes).
    """
    env = dict(os.environ)
    env.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank),
        DYNMO_RENDEZVOUS=str(folder),
        DYNMO_LAUNCHER=str(os.getpid()),
        OMP_NUM_THREADS=str(threads),
        MKL_NUM_THREADS=str(threads),
        MALLOC_MMAP_THRESHOLD_=str(32 << 20),
        MALLOC_TRIM_THRESHOLD_=str(1 << 40),
        MALLOC_TOP_PAD_=str(64 << 20),
        PYTHONUNBUFFERED="1",
    )
    if size > 1:
        for name, value in FOR_RANKS_ON_CUDA.items():
            env.setdefault(name, value)
    if sys.platform == "linux":
        env["GLOO_SOCKET_IFNAME"] = "lo"
    return env


def spawn(command: Sequence[str], size: int, threads: int, log_folder: Path) -> int:
    """Runs `command` (an argument list) as `size` ranks until all have ended. Returns 0, or 130
    when all stopped as a signal asked.

    The command calls `enter_rank` first. Raises RunError or InputError with the cause if a rank
    fails, Interrupted if a signal ended ranks that were not training; no process is left behind.
    Raises ConfigError before any rank starts if they are too many.
    """
    if size > most_local_ranks():
        raise ConfigError(
            f"parallel.pipeline x parallel.data = {size} ranks, but at most {most_local_ranks()} start on this machine; "
            "use fewer, or start them on several machines with torchrun or Slurm"
        )
    ranks: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="dynmo-") as name, _signals(ranks) as asked:
        folder = Path(name)
        try:
            for rank in range(size):
                env = rank_environment(rank, size, folder, threads)
                # Rank 0 speaks for the run; the others write to a log.
                _start(ranks, asked, command, env, log_folder / f"rank-{rank}.log" if rank else None)
            _watch(ranks, folder)
            return _verdict(ranks, folder, log_folder, asked)
        finally:
            _end(ranks)
            log = log_folder / "rank-0.log"  # of crashes only; all else went to the terminal
            if log.is_file() and not log.stat().st_size:
                log.unlink()


def _start(ranks: list[subprocess.Popen[bytes]], asked: list[float], command: Sequence[str], env: dict[str, str], log: Path | None) -> None:
    """Adds one process to `ranks`, unless a stop was asked for."""
    # Signals wait until it is on the list. It inherits that, so that Ctrl-C, which a terminal sends
    # to all processes, does not break into its imports; `enter_rank` lets them in again.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    try:
        if asked:
            return
        with contextlib.nullcontext() if log is None else log.open("ab") as out:
            ranks.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env))
    except OSError as error:
        raise RunError(f"rank {env['RANK']} could not be started: {error}") from None
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)


@contextlib.contextmanager
def _signals(ranks: list[subprocess.Popen[bytes]]) -> Iterator[list[float]]:
    """While open, SIGINT and SIGTERM ask the ranks to stop; yields the moments at which that was
    asked."""
    asked: list[float] = []

    def ask(number: int, frame: FrameType | None) -> None:
        asked.append(time.monotonic())
        for process in ranks:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM if len(asked) == 1 else signal.SIGKILL)

    before = {number: signal.signal(number, ask) for number in _STOP_SIGNALS}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_STOPPED = 130  # a rank's exit status when it was asked to stop, and did: no failure, and others may still have to write their files


def _watch(ranks: list[subprocess.Popen[bytes]], folder: Path) -> None:
    """Returns when all ranks have ended, or the grace after a failure is over. After a signal they
    take as long as their step and what they save takes: a second signal kills them.

    Ranks that others have waited for in vain get the short grace: they hang, and will not say why.
    """
    failed_at: float | None = None
    while any(process.poll() is None for process in ranks):
        now = time.monotonic()
        if failed_at is None and any(process.poll() not in (None, 0, _STOPPED) for process in ranks):
            failed_at = now
        if failed_at is not None and now - failed_at > _GRACE_WHEN_HUNG:
            living = {rank for rank, process in enumerate(ranks) if process.poll() is None}
            blamed = {rank for failure in _failures(folder).values() for rank in failure.waits_for}
            if now - failed_at > _GRACE or living <= blamed:
                return
        time.sleep(0.02)


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    """No process is left behind."""
    for process in ranks:
        if process.poll() is None:
            process.kill()
    for process in ranks:
        process.wait()


def _failures(folder: Path) -> dict[int, Failure]:
    """What the ranks have said of why they ended, by rank."""
    reports = {int(path.stem.removeprefix("failed-")): path for path in folder.glob("failed-*.json")}
    return {rank: Failure(**json.loads(path.read_text())) for rank, path in reports.items()}


def _verdict(ranks: list[subprocess.Popen[bytes]], folder: Path, log_folder: Path, asked: list[float]) -> int:
    codes = [process.poll() for process in ranks]
    # A rank that we ended on request (it was not training, or was asked twice) has not failed, and
    # what its peers say is a consequence. (If one returned 130, all had agreed to stop, and a late
    # signal met the others on their way out.)
    ours = (None, -signal.SIGTERM, -signal.SIGKILL) if asked else ()
    ended = 130 not in codes and (not codes or any(code in ours for code in codes))
    failures: dict[int, Failure] = {}
    reports = _failures(folder)
    for rank, code in enumerate(codes):
        if rank in reports:
            if not (ended and reports[rank].weight > 1):
                failures[rank] = reports[rank]
        elif code is not None and code < 0 and code not in ours:
            log = log_folder / f"rank-{rank}.log"
            hint = f"; see {log}" if log.is_file() and log.stat().st_size else ""
            hint = "; out of memory?" if code == -signal.SIGKILL else hint
            failures[rank] = Failure(1, 1, f"rank {rank} was ended by {signal.Signals(-code).name}{hint}")
        elif code not in (None, 0, 130) and code not in ours:
            where = f"; see {log_folder / f'rank-{rank}.log'}" if rank else ""
            failures[rank] = Failure(1, 1, f"rank {rank} ended with status {code}{where}")
    if failures:
        cause = failures[min(failures, key=lambda rank: _distance(rank, failures))]
        error = (InputError if cause.status == 2 else RunError)(cause.message)
        if cause.trace:
            error.add_note(f"The rank's own traceback:\n{cause.trace}")
        raise error
    if not ended:
        return 130 if 130 in codes else 0
    if len(asked) > 1:
        raise Interrupted(
            "interrupted twice, so the ranks were ended at once; --resume goes on from the newest checkpoint, if there is one"
        )
    if None in codes:
        raise Interrupted("interrupted; not every rank came to a stop in time, so they were ended")
    raise Interrupted("interrupted while starting or finishing")


def _distance(rank: int, failures: dict[int, Failure]) -> tuple[int, bool, int]:
    """Orders failures from cause to consequence: one that waited for ranks which themselves
    complain is further away."""
    failure = failures[rank]
    return failure.weight, bool(failure.waits_for) and failures.keys() >= set(failure.waits_for), rank


# -- the rank's side -------------------------------------------------------------------------------


def is_local_rank() -> bool:
    """Whether this process is a rank that `spawn` started."""
    return "DYNMO_RENDEZVOUS" in os.environ


def enter_rank(log: Path | None = None) -> None:
    """Called first in a rank that `spawn` started.

    The rank dies with its launcher, leaves Ctrl-C to it, and tells where it crashed.

    Args:
        log: Takes the stack of a crash, and what torch's C++ writes to stderr. None: stderr.
    """
    if log is not None:
        with contextlib.suppress(OSError):  # as on a full disk: the terminal has it then
            _native_stderr_to(log)
    faulthandler.enable(2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
        if os.getppid() != int(os.environ["DYNMO_LAUNCHER"]):  # it died before we asked
            os._exit(1)


def _native_stderr_to(log: Path) -> None:
    """Everything but Python's own `sys.stderr`, which stays where it is."""
    with log.open("ab") as file:
        terminal = os.dup(2)
        os.dup2(file.fileno(), 2)
    own = open(terminal, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = own


def report_failure(error: BaseException, log: Path | None = None) -> int:
    """Leaves the reason for the launcher; returns the exit status. log: where the traceback is
    written."""
    rank, trace = int(os.environ["RANK"]), "".join(traceback.format_exception(error))
    logged = log is not None and _log_traceback(error, log)
    if isinstance(error, DynmoError):
        # A rank that lost a peer, or waited in vain, suffers from a failure elsewhere.
        weight = 3 if isinstance(error, RankDied) else 2 if isinstance(error, WaitTimeout) else 0
        waits_for = error.ranks if isinstance(error, WaitTimeout) else ()
        failure = Failure(weight, error.exit_status, " ".join(str(error).split()), waits_for, trace)
    else:
        where = f"; the traceback is in {log}" if logged else ""
        failure = Failure(0, 1, describe(error, rank) + where, trace=trace)
    path = Path(os.environ["DYNMO_RENDEZVOUS"]) / f"failed-{rank}.json"
    try:
        write_whole(path, json.dumps(vars(failure)))
    except OSError:  # the launcher then knows the status only
        _logger.error(failure.message)
    return failure.status


def quiet_torch() -> None:
    """Leaves out the warnings of torch's C++ about every connection that is lost.

    For a rank that tells its errors itself, in one line. Works before torch is imported.
    """
    if os.environ.get("DYNMO_TRACEBACK") != "1":
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def _log_traceback(error: BaseException, log: Path) -> bool:
    """Whether it could be written: the disk may be full, which is why the rank ends."""
    try:
        with log.open("a", encoding="utf-8") as file:
            traceback.print_exception(error, file=file)
    except OSError:
        return False
    return True


def describe(error: BaseException, rank: int) -> str:
    """One line for an error that is not dynmo's own: rank, what, where (in which layer, where its
    note says so)."""
    notes = "".join(f", {' '.join(note.split())}" for note in getattr(error, "__notes__", ()))
    return f"rank {rank}: {type(error).__name__}: {' '.join(str(error).split())}{place(error, own=True)}{notes}"
