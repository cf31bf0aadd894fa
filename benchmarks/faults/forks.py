"""Runs `dynmo` with all its processes as forks: `python -m benchmarks.faults.forks`.

Importing torch costs seconds, and a fork of a process that has it costs milliseconds. This server
reads one job a line. It forks a launcher, which runs the command line of `dynmo`. The launcher's
ranks are forks of a process beside it, and children of the launcher:

    server ── launcher ─┬─ forker (no thread of its own)
                        ├─ rank 0
                        └─ rank 1

The server adopts every process that loses its parent. It therefore sees what a run leaves behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from benchmarks.faults import hosts, inject
from dynmo.cli import train
from dynmo.elastic.managers import local
from dynmo.signals import SAVE_SIGNAL, STOP_SIGNALS
from dynmo.train.compile_ahead import prepare

_NEEDED = ("torch._dynamo", "dynmo.report.lines", "dynmo.train.run")
"""What a rank would import."""
_PARENT_DIES, _SUBREAPER = 1, 36  # PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER
_LINE = 1 << 20  # bytes of a request, at most
_TICK = 0.01
_LEFT = 5.0  # seconds that processes get to end after their launcher


@dataclass
class Job:
    """One start of `dynmo`.

    Attributes:
        folder: Working folder. Outputs go to `out` and `err` there, behind what is there.
        arguments: The command line behind `dynmo`.
        faults: What strikes in the ranks, or from outside.
        limit: Seconds after which the run counts as hung.
        hosts: Names of two network namespaces for the ranks, or none.
    """

    folder: str
    arguments: list[str]
    faults: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    limit: float = 60.0
    hosts: list[str] = field(default_factory=list[str])


# -- ranks -----------------------------------------------------------------------------------------


class Forker:
    """The launcher's side of the process that forks its ranks."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        _control(_SUBREAPER, 1)
        launcher = os.getpid()
        if not os.fork():
            self._socket.close()
            signal.pthread_sigmask(signal.SIG_BLOCK, (*STOP_SIGNALS, SAVE_SIGNAL))
            _control(_PARENT_DIES, signal.SIGKILL)
            _fork_ranks(theirs, launcher)
            os._exit(0)
        theirs.close()

    def start(
        self,
        command: Sequence[str],
        stdin: object,
        stdout: IO[bytes] | None,
        stderr: object,
        env: Mapping[str, str],
    ) -> ForkedProcess:
        """Stands for `subprocess.Popen`."""
        del stdin, stderr
        request = json.dumps([command, dict(env)]).encode()
        out = sys.stderr.fileno() if stdout is None else stdout.fileno()
        files = [sys.stdout.fileno() if stdout is None else out, out]
        socket.send_fds(self._socket, [request], files)
        return ForkedProcess(int(self._socket.recv(64)))


class ForkedProcess:
    """A rank, with the methods of `subprocess.Popen` that a launcher uses."""

    def __init__(self, pid: int) -> None:
        self.pid, self._code = pid, None

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self) -> int | None:
        return self._wait(0)

    def _wait(self, options: int) -> int | None:
        if self._code is None and (ended := os.waitpid(self.pid, options))[0]:
            self._code = os.waitstatus_to_exitcode(ended[1])
        return self._code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def reason(self) -> str:
        return ""


def _fork_ranks(requests: socket.socket, launcher: int) -> None:
    """Forks a rank for each request, until the launcher has ended."""
    while True:
        text, files, _, _ = socket.recv_fds(requests, _LINE, 2)
        if not text:
            return
        read, write = os.pipe()
        between = os.fork()
        if not between:
            rank = os.fork()
            if not rank:
                os.close(read)
                os.close(write)
                requests.close()
                command, environment = json.loads(text)
                while os.getppid() != launcher:  # which adopts it
                    time.sleep(0.001)
                _become_rank(command, environment, files)
            os.write(write, str(rank).encode())
            os._exit(0)
        os.waitpid(between, 0)  # the launcher has the rank from here on
        requests.send(os.read(read, 64))
        for file in (*files, read, write):
            os.close(file)


def _become_rank(command: Sequence[str], environment: dict[str, str], files: list[int]) -> None:
    for number, file in enumerate(files, 1):
        os.dup2(file, number)
        os.close(file)
    _as_new_process(environment)
    sys.argv = ["dynmo", *command[command.index("dynmo") + 1 :]]
    hosts.enter_rank()
    inject.enter(environment)
    _run_dynmo()


def _as_new_process(environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = os.fdopen(os.dup(number), "w", buffering=1, errors="backslashreplace")
        setattr(sys, name, stream)


def _run_dynmo() -> None:
    from dynmo.__main__ import run

    status: object = 1
    try:
        run()
    except SystemExit as end:
        status = end.code
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status if isinstance(status, int) else 1)


def _control(what: int, value: int) -> None:
    ctypes.CDLL(None).prctl(what, value, 0, 0, 0)


# -- the server ------------------------------------------------------------------------------------


def _launch(job: Job) -> int:
    """Forks a launcher. Returns its process."""
    sys.stdout.flush()
    launcher = os.fork()
    if launcher:
        return launcher
    _control(_PARENT_DIES, signal.SIGKILL)
    os.setsid()
    os.chdir(job.folder)
    for number, name in ((0, os.devnull), (1, "out"), (2, "err")):
        file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, number)
        os.close(file)
    given = {"DYNMO_FAULTS": json.dumps(job.faults), "DYNMO_FAULTS_FOLDER": job.folder}
    _as_new_process({**os.environ, **given})
    if job.hosts:
        # As Slurm starts ranks on several hosts, but by forks.
        hosts.enter_launcher(job.hosts)
        train._starter = lambda *_: local.LocalStarter()
        job.arguments += ["--launcher", "slurm"]
    local.LocalProcess = Forker().start  # pyright: ignore[reportAttributeAccessIssue]
    sys.argv = ["dynmo", *job.arguments]
    _run_dynmo()
    return 0


def run(job: Job) -> dict[str, Any]:
    """Runs a job to its end, and acts as the faults need it from outside.

    Returns the launcher's `status` (None if it hung), the `seconds`, and the command lines of
    processes that were `left`.
    """
    start = time.time()
    launcher, outside = _launch(job), inject.Outside(job.faults, Path(job.folder), start, job.hosts)
    status: int | None = None
    while True:
        done, code = os.waitpid(launcher, os.WNOHANG)
        if done:
            status = os.waitstatus_to_exitcode(code)
            break
        if time.time() - start > job.limit:
            break
        outside.act(launcher)
        time.sleep(_TICK)
    seconds = time.time() - start
    if status is None:
        _tell_stacks(launcher)
    outside.end()
    left = _end_left(_LEFT if status is not None else 0.0)
    return {"status": status, "seconds": seconds, "left": left}


def _tell_stacks(launcher: int) -> None:
    """Ends a run that hangs. Its ranks write to their logs where they are."""
    os.kill(launcher, signal.SIGSTOP)  # it would end them
    for number in (signal.SIGABRT, signal.SIGCONT):
        for pid in _descendants():
            if pid != launcher:
                os.kill(pid, number)
    time.sleep(1.0)
    os.kill(launcher, signal.SIGKILL)


def _end_left(seconds: float) -> list[str]:
    """Waits for all descendants to end. Kills the others, and returns who they were."""
    end, left = time.time() + seconds, set[str]()
    while True:
        try:
            if not os.waitpid(-1, os.WNOHANG)[0]:
                if time.time() > end:
                    for pid in _descendants():
                        left.add(_name(pid))
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                time.sleep(_TICK)
        except ChildProcessError:
            return sorted(left)


def _descendants() -> list[int]:
    found, parents = list[int](), [os.getpid()]
    while parents:
        parent = parents.pop()
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{parent}/task/{parent}/children").read_text()
            children = [int(each) for each in text.split()]
            found += children
            parents += children
    return found


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        return f"{pid} {state} {line[-60:]}"
    return f"{pid} gone"


def main() -> None:
    _control(_SUBREAPER, 1)
    _control(_PARENT_DIES, signal.SIGKILL)
    for name in _NEEDED:
        import_module(name)
    prepare()
    inject.load()
    gc.collect()
    gc.freeze()
    requests = os.fdopen(os.dup(0), "r")
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print("{}", file=replies, flush=True)  # it is ready
    for line in requests:
        print(json.dumps(run(Job(**json.loads(line)))), file=replies, flush=True)


if __name__ == "__main__":
    main()
