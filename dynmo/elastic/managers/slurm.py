"""Starts ranks through Slurm's `srun`.

    inside of an allocation    one step per rank. A node is given back when its last rank has left
    outside                    one job per rank. A job frees its node as it ends
    ranks that join later      one job per rank, in both cases. They may be pending for hours

Ranks run as steps that share their node (`--overlap`), so that several of them see all its devices.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

from dynmo.elastic.manager import RankCommand, RankProcess
from dynmo.errors import ConfigError, RunError

# Seconds that a command of Slurm may take.
_LIMIT = 60.0
# Starts of lines of srun and of its node daemon, among the output of the rank.
_OWN = (b"srun: ", b"slurmstepd")
# Parts of lines of srun that repeat the status.
_STATUS_ONLY = ("task 0: ", "*** STEP ", "*** JOB ")
_PENDING = "queued and waiting"


class SlurmProcess:
    """A rank that runs under its own `srun`."""

    def __init__(self, rank: RankCommand, command: Sequence[str], env: Mapping[str, str]) -> None:
        self.process = rank.process
        # None if the rank has a job of its own.
        self.node: str | None = None
        self._entered = rank.entered
        self._errors: list[str] = []
        out: IO[bytes] | None = None if rank.log is None else rank.log.open("ab")
        try:
            self._srun = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.PIPE,
                env=env,
                # Ctrl-C of the terminal is for the launcher.
                start_new_session=True,
            )
        except OSError:
            if out is not None:
                out.close()
            raise
        self._reader = threading.Thread(target=self._read, args=(out,), daemon=True)
        self._reader.start()

    def _read(self, out: IO[bytes] | None) -> None:
        """Passes on the rank's stderr, and keeps the lines of srun."""
        assert self._srun.stderr is not None
        split = LineSplitter()
        while chunk := os.read(self._srun.stderr.fileno(), 65536):
            self._pass_on(split.add(chunk), out)
        self._pass_on(split.rest(), out)
        self._srun.stderr.close()
        if out is not None:
            out.close()

    def _pass_on(self, pieces: Iterable[tuple[bool, bytes]], out: IO[bytes] | None) -> None:
        for own, piece in pieces:
            if own:
                self._hear(piece.decode(errors="replace"))
                continue
            file = sys.stderr.buffer if out is None else out
            file.write(piece)
            file.flush()

    def _hear(self, line: str) -> None:
        said = re.fullmatch(r"(?:srun|slurmstepd[^:]*): (error: |fatal: )?(.*)", line.strip())
        if said is None:
            return
        level, message = said.groups()
        if self.process == 0 and _PENDING in message:
            print(f"dynmo: rank 0: {message}", file=sys.stderr)
        says_more = not any(part in message for part in _STATUS_ONLY)
        if level and says_more and message not in self._errors:
            self._errors.append(message)

    def reason(self) -> str:
        if self.poll() is not None:
            self._reader.join(1.0)
        return "; ".join(self._errors)

    def poll(self) -> int | None:
        code = self._srun.poll()
        if code is not None and code > 128 and code != 130:  # the rank's signal, as a shell says it
            return 128 - code
        return code

    def send_signal(self, sig: int, /) -> None:
        # A signal to `srun` itself would kill the rank.
        step = self._step()
        if step is None or not _asks(["scancel", f"--signal={signal.Signals(sig).name[3:]}", step]):
            self._srun.terminate()

    def kill(self) -> None:
        step = self._step()
        if step is not None:
            _asks(["scancel", "--signal=KILL", step])
        self._srun.kill()

    def wait(self) -> int:
        self._srun.wait()
        code = self.poll()
        assert code is not None
        return code

    def _step(self) -> str | None:
        """Returns the step as Slurm numbers it. None if the rank has not entered yet."""
        try:
            return json.loads(self._entered.read_text(encoding="utf-8")).get("step")
        except (OSError, ValueError):
            return None


class LineSplitter:
    """Separates the lines of srun from the rank's output.

    Unfinished lines of the rank pass at once.

    Example:
        >>> list(LineSplitter().add(b"step 1\\nsrun: error: no\\nstep"))
        [(False, b'step 1\\n'), (True, b'srun: error: no\\n'), (False, b'step')]
    """

    def __init__(self) -> None:
        self._held = b""
        self._inside = False  # True inside a line of the rank

    def add(self, chunk: bytes) -> list[tuple[bool, bytes]]:
        """Takes the next bytes. Returns pieces, each with True if it is a line of srun."""
        pieces: list[tuple[bool, bytes]] = []
        for line in (self._held + chunk).splitlines(keepends=True):
            whole = line.endswith((b"\n", b"\r"))
            own = not self._inside and line.startswith(_OWN)
            perhaps = not self._inside and any(prefix.startswith(line) for prefix in _OWN)
            if not whole and (own or perhaps):
                self._held = line
                return pieces
            pieces.append((own, line))
            self._inside = not whole
        self._held = b""
        return pieces

    def rest(self) -> list[tuple[bool, bytes]]:
        held, self._held = self._held, b""
        return [(held.startswith(_OWN), held)] if held else []


def _asks(command: Sequence[str]) -> bool:
    try:
        _run(command)
    except RunError:
        return False
    return True


def _run(command: Sequence[str], folder: Path | None = None) -> str:
    name = " ".join(command[:2])
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=_LIMIT, check=False
        )
    except OSError as error:
        raise RunError(f"{name} cannot be run: {error}") from None
    except subprocess.TimeoutExpired:
        raise RunError(f"the launcher waited {_LIMIT:g} s for {name}") from None
    said = " ".join((done.stderr or done.stdout).split())
    if done.returncode:
        raise RunError(f"{name} failed: {said or f'status {done.returncode}'}")
    return done.stdout


class SlurmStarter:
    """Starts ranks as steps of the current allocation, or as jobs of their own."""

    def __init__(self, size: int, folder: Path, job_options: Sequence[str] = ()) -> None:
        """Looks at the allocation.

        Args:
            size: The number of ranks at the start.
            folder: Takes the files of `scontrol`. It may not exist yet.
            job_options: Options of `srun` for jobs of one rank: partition, devices, time limit.

        Raises:
            ConfigError: Slurm is not installed here, or its controller does not answer.
        """
        for program in ("srun", "scontrol", "scancel"):
            if shutil.which(program) is None:
                raise ConfigError(
                    f"--launcher slurm: Slurm is not installed on this machine ({program} is not "
                    "in PATH); leave out --launcher to start the ranks here"
                )
        self._size = size
        self._folder = folder
        self._job_options = list(job_options)
        self._job = os.environ.get("SLURM_JOB_ID")
        self._nodes: list[str] = []
        self._by_node: dict[str, list[SlurmProcess]] = {}
        self._resizing = threading.Lock()
        try:
            if self._job is None:
                answer = _run(["scontrol", "ping"])
                if "UP" not in answer:
                    raise RunError(" ".join(answer.split()))
            else:
                nodes = os.environ.get("SLURM_JOB_NODELIST", "")
                self._nodes = _run(["scontrol", "show", "hostnames", nodes]).split()
        except RunError as error:
            raise ConfigError(
                f"--launcher slurm: no allocation (SLURM_JOB_ID) and no controller: {error}"
                if self._job is None
                else f"--launcher slurm: job {self._job}: {error}"
            ) from None

    def start(self, rank: RankCommand) -> RankProcess:
        if self._job is None or rank.joins:
            return self._start_job(rank)
        return self._start_step(rank)

    def _start_step(self, rank: RankCommand) -> SlurmProcess:
        nodes = self._nodes[: self._size]
        node_of = [nodes[at * len(nodes) // self._size] for at in range(self._size)]
        node = node_of[rank.process]
        env = {
            **os.environ,
            **rank.environment,
            "LOCAL_RANK": str(node_of[: rank.process].count(node)),
            "LOCAL_WORLD_SIZE": str(node_of.count(node)),
        }
        # Ranks share the devices of their node, as under torchrun.
        where = [f"--job-name=dynmo-{rank.process}", "--overlap", f"--nodelist={node}"]
        process = SlurmProcess(rank, _srun(where, rank.command), env)
        process.node = node
        self._by_node.setdefault(node, []).append(process)
        return process

    def _start_job(self, rank: RankCommand) -> SlurmProcess:
        env = own_job_environment(rank.environment)
        env |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        name = f"--job-name={'dynmo-join' if rank.joins else 'dynmo'}"
        return SlurmProcess(rank, _srun([name, *self._job_options], rank.command), env)

    def released(self, processes: Sequence[RankProcess]) -> str:
        ended = [process for process in processes if isinstance(process, SlurmProcess)]
        jobs = sum(process.node is None for process in ended)
        told = ["1 job ended"] if jobs == 1 else [f"{jobs} jobs ended"] if jobs else []
        nodes = sorted({process.node for process in ended if process.node is not None})
        with self._resizing:
            empty = [node for node in nodes if self._is_empty(node)]
            free = [node for node in empty if not _is_own(node)]
            if free:
                self._shrink(free)
                told.append(f"job {self._job} gave back {', '.join(free)}")
        told += [f"{node} stays: the launcher runs there" for node in empty if node not in free]
        shared = [node for node in nodes if node not in empty]
        told += [f"{node} cannot be given back until its last rank leaves" for node in shared]
        if not free and not jobs:
            raise RunError("; ".join(told))
        return "; ".join(told)

    def _is_empty(self, node: str) -> bool:
        return all(process.poll() is not None for process in self._by_node[node])

    def _shrink(self, free: Sequence[str]) -> None:
        stay = [node for node in self._nodes if node not in free]
        # scontrol writes a script into its folder that corrects the environment of a shell.
        folder = self._folder if self._folder.is_dir() else None
        job = f"JobId={self._job}"
        _run(["scontrol", "update", job, f"NodeList={','.join(stay)}"], folder)
        self._nodes = stay

    def close(self) -> None:
        pass


def _srun(options: Sequence[str], command: Sequence[str]) -> list[str]:
    setpriv = shutil.which("setpriv")
    # srun dies with the launcher, and the rank with srun.
    dies = [setpriv, "--pdeathsig=KILL"] if setpriv is not None else []
    always = ["--nodes=1", "--ntasks=1", "--export=ALL", "--input=none", "--mpi=none"]
    # A rank that fails must not end the others.
    free = ["--cpu-bind=none", "--kill-on-bad-exit=0"]
    return [*dies, "srun", *always, *free, *options, *command]


def own_job_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment without the current allocation, for a job of its own."""
    devices = {"CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"}
    if "SLURM_JOB_ID" not in environ:
        devices = set[str]()
    slurms = {name for name in environ if name.startswith(("SLURM_", "SLURMD_"))}
    dropped = (slurms | devices) - {"SLURM_CONF"}
    return {name: value for name, value in environ.items() if name not in dropped}


def _is_own(node: str) -> bool:
    here = os.environ.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0]
    return node == here
