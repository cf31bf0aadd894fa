"""The rank's side of its launcher: a rank enters, and leaves the reason if it fails."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import json
import logging
import os
import signal
import sys
import traceback
from collections.abc import Generator, Mapping
from pathlib import Path
from types import FrameType

from dynmo.elastic.launcher.failure import Failure
from dynmo.elastic.manager import own_node
from dynmo.errors import DynmoError, PeerFailed, RankDied, WaitTimeout, notes, place
from dynmo.files import write_whole
from dynmo.signals import SAVE_SIGNAL, STOP_SIGNALS

_logger = logging.getLogger(__name__)


def is_local_rank() -> bool:
    """Returns True if a launcher of dynmo started this process."""
    return "DYNMO_RENDEZVOUS" in os.environ


def enter_rank(log: Path | None = None) -> None:
    """Prepares a process that a launcher of dynmo started. Must be called first.

    The process says that it runs, leaves Ctrl-C to its launcher, and logs the place of a crash. A
    local process dies with its launcher.

    Args:
        log: Takes the stack of a crash, and the output of torch's C++ to stderr. None means stderr.
    """
    if log is not None:
        with contextlib.suppress(OSError):  # as on a full disk; the terminal then has it
            _native_stderr_to(log)
    faulthandler.enable(2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    survive_save_signal()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*STOP_SIGNALS, SAVE_SIGNAL))
    if sys.platform == "linux" and "DYNMO_LAUNCHER" in os.environ:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
        if os.getppid() != int(os.environ["DYNMO_LAUNCHER"]):  # the launcher died before prctl
            os._exit(1)
    about = {"host": own_node()}
    if "SLURM_STEP_ID" in os.environ:
        about["step"] = f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}"
    with contextlib.suppress(OSError):  # as on a full disk, and the launcher then knows less
        _tell("entered", about)


def survive_save_signal() -> None:
    """Lets the signal that asks to save end nothing while there is nothing to save."""
    signal.signal(SAVE_SIGNAL, _nothing_to_save)


def _nothing_to_save(number: int, frame: FrameType | None) -> None:
    del frame
    if os.environ.get("RANK", "0") == "0":
        name = signal.Signals(number).name
        _logger.warning(f"{name}: no step is under way, so there is nothing to save")


def _tell(what: str, content: Mapping[str, object]) -> None:
    """Leaves a file for the launcher, which reaches it without the store."""
    folder = Path(os.environ["DYNMO_RENDEZVOUS"])
    write_whole(folder / f"{what}-{os.environ['DYNMO_PROCESS']}", json.dumps(content))


@contextlib.contextmanager
def printed_by_launcher() -> Generator[None]:
    """Hands over what is printed if this process does not write to the terminal itself."""
    if os.environ.get("DYNMO_PROCESS", "0") == "0":
        yield
        return
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        yield
    _tell("printed", {"text": printed.getvalue()})


def _native_stderr_to(log: Path) -> None:
    """Redirects stderr to the log, except for Python's own `sys.stderr`."""
    with log.open("ab") as file:
        terminal = os.dup(2)
        os.dup2(file.fileno(), 2)
    stderr = open(  # noqa: SIM115
        terminal, "w", buffering=1, errors="backslashreplace", closefd=False
    )
    sys.stderr = stderr


def report_failure(error: BaseException, log: Path | None = None) -> int:
    """Leaves the reason for the launcher, and the traceback in the log. Returns the exit status."""
    trace, where = "".join(traceback.format_exception(error)), ""
    if log is not None:
        with contextlib.suppress(OSError), log.open("a", encoding="utf-8") as file:
            file.write(trace)
            where = f"; the traceback is in {log}"
    if isinstance(error, DynmoError):
        # If a rank has lost a peer or has waited in vain, the failure is elsewhere.
        lost = isinstance(error, RankDied | PeerFailed)
        weight = 3 if lost else 2 if isinstance(error, WaitTimeout) else 0
        waits_for = error.ranks if isinstance(error, WaitTimeout) else ()
        message = " ".join(str(error).split())
        failure = Failure(weight, error.exit_status, message, waits_for, trace)
    else:
        rank = int(os.environ["DYNMO_PROCESS"])
        failure = Failure(0, 1, describe(error, rank) + where, trace=trace)
    try:
        _tell("failed", vars(failure))
    except OSError:  # the launcher then knows the status only
        _logger.error(failure.message)
    return failure.status


def quiet_torch() -> None:
    """Silences torch's C++ warnings about lost connections. Works before torch is imported."""
    if os.environ.get("DYNMO_TRACEBACK") != "1":
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def describe(error: BaseException, rank: int | None) -> str:
    """Returns one line for an error that is not dynmo's own: rank, error, place, notes.

    The rank is None if the process is not a rank yet.
    """
    what = f"{type(error).__name__}: {' '.join(str(error).split())}"
    who = "the process that joins" if rank is None else f"rank {rank}"
    return f"{who}: {what}{place(error, own=True)}{notes(error)}"
