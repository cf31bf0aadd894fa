"""What is around the processes of a run: variables, the launch folder, their end."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from dynmo.elastic.manager import own_node
from dynmo.errors import RunError

# A posted receive is a kernel that spins until its message is there. A kernel that is loaded at its
# first launch may wait until the device is idle, which such a receive prevents. Streams that share
# a connection wait for each other. CUDA reads both settings as it starts.
FOR_RANKS_ON_CUDA = {"CUDA_MODULE_LOADING": "EAGER", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}

_MAKING = 10.0  # seconds after which a folder without a lock was left by a process


def prepare_cuda(ranks: int) -> None:
    """Sets the variables that CUDA's libraries read, unless the user has set them.

    CUDA and cuBLAS read them once in a process, so this comes before the first CUDA call. cuBLAS
    gives the same bits only with workspaces of one size.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    for name, value in FOR_RANKS_ON_CUDA.items() if ranks > 1 else ():
        os.environ.setdefault(name, value)


def most_local_ranks() -> int:
    """Returns the number of ranks that one machine may start.

    A process of torch takes some 200 MB, and many ranks share a core poorly.
    """
    return max(64, 4 * (os.cpu_count() or 1))


def malloc_settings() -> dict[str, str]:
    """Returns variables with which glibc keeps the memory that a process frees.

    By default it returns each large block to the system. Stashes are freed all the time, and the
    page faults cost several percent. 32 MiB is the largest threshold that glibc takes.
    """
    return {
        "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
        "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
        "MALLOC_TOP_PAD_": str(64 << 20),
    }


def process_environment(process: int, size: int, folder: Path, threads: int) -> dict[str, str]:
    """Returns the environment of one process, on whatever machine."""
    env = {**os.environ, **malloc_settings()}
    env.update(
        RANK=str(process),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(process),
        DYNMO_PROCESS=str(process),
        DYNMO_RENDEZVOUS=str(folder),
        DYNMO_LAUNCHER_NODE=own_node(),
        OMP_NUM_THREADS=str(threads),
        MKL_NUM_THREADS=str(threads),
        PYTHONUNBUFFERED="1",
    )
    if size > 1:
        for name, value in FOR_RANKS_ON_CUDA.items():
            env.setdefault(name, value)
    return env


@contextlib.contextmanager
def launch_folder(folder: Path | None) -> Iterator[Path]:
    """Makes a folder for a launcher and its ranks, and removes it afterwards.

    A temporary folder stays locked. Cleaners of temporary files then leave it alone, and the next
    launcher sees that it is in use.
    """
    with contextlib.ExitStack() as stack:
        try:
            if folder is None:
                _remove_left_folders()
                folder = Path(tempfile.mkdtemp(prefix=_prefix()))
                with contextlib.suppress(OSError):  # no such locks here
                    stack.callback(os.close, _locked(folder))
            else:
                shutil.rmtree(folder, ignore_errors=True)  # left by a launcher that was killed
                folder.mkdir(mode=0o700)
        except OSError as error:
            raise RunError(f"{folder} cannot be made: {error}") from None
        try:
            yield folder.absolute()
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _locked(folder: Path) -> int:
    """Opens and locks a folder. Raises OSError if another process holds the lock."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise
    return handle


def _prefix() -> str:
    """Returns the begin of the names of this machine's launch folders."""
    return f"dynmo-launch-{socket.gethostname()}-"


def _remove_left_folders() -> None:
    """Removes temporary folders of launchers that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_prefix()}*"):
        with contextlib.suppress(OSError):  # in use, or another user's
            if time.time() - folder.stat().st_ctime > _MAKING:
                handle = _locked(folder)
                shutil.rmtree(folder, ignore_errors=True)
                os.close(handle)


def keep(folder: Path) -> None:
    """Touches the files of a launch folder, so that no cleaner of temporary files takes them."""
    with contextlib.suppress(OSError):  # a file may be written or removed just now
        for path in (folder, *folder.iterdir()):
            os.utime(path)


def clear_live_line() -> None:
    """Clears the terminal's line of a rank 0 that was killed, which had hidden the cursor, too."""
    if sys.stderr.isatty():
        print("\r\x1b[K\x1b[?25h", end="", file=sys.stderr, flush=True)


def end_process(status: int) -> NoReturn:
    """Ends a process without the finalization of Python and torch.

    A thread of a process group may still be ending. Finalization would then abort the process,
    although its work is done. It would also wait for threads that plan. Exit functions have run and
    output is flushed.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # as on a closed pipe
            stream.flush()
    os._exit(status)
