"""Starts ranks through Slurm's `srun`.

    inside of an allocation    one step per rank. A node is given back when its last rank has left
    outside                    one job per rank. A job frees its node as it ends
    newcomers                  one job per rank, in both cases. They may be pending for hours

Ranks run as steps that share their node (`--overlap`), so that several of them see all its devices.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from dynmo.elastic.manager import RankCommand, RankProcess
from dynmo.errors import ConfigError, RunError

# Seconds that a command of Slurm may take.
_LIMIT = 60.0
# Starts of lines of srun and of its node daemon, among the output of the rank.
_OWN = (b"srun: ", b"slurmstepd")
# Parts of lines of srun that repeat the status.
_STATUS_ONLY = ("task 0: ", "*** STEP ", "*** JOB ")
_PENDING = "queued and waiting"
# A rank that fails must not end the others.
_SRUN = (
    *("srun", "--nodes=1", "--ntasks=1", "--export=ALL", "--input=none", "--mpi=none"),
    *("--cpu-bind=none", "--kill-on-bad-exit=0"),
)


class SlurmProcess(subprocess.Popen[bytes]):
    """A rank that runs under its own `srun`. Its node is None if it has a job of its own."""

    def __init__(
        self, rank: RankCommand, options: Sequence[str], env: Mapping[str, str], node: str | None
    ) -> None:
        self.process, self.node = rank.process, node
        self._entered = rank.entered
        self._errors: list[str] = []
        # srun dies with the launcher, and the rank with srun.
        dies = ["setpriv", "--pdeathsig=KILL"] if shutil.which("setpriv") else []
        command = [*dies, *_SRUN, *options, *rank.command]
        none, pipe = subprocess.DEVNULL, subprocess.PIPE
        with contextlib.nullcontext() if rank.log is None else rank.log.open("ab") as out:
            # Ctrl-C of the terminal is for the launcher.
            super().__init__(
                command, stdin=none, stdout=out, stderr=pipe, env=env, start_new_session=True
            )
        self._reader = threading.Thread(target=self._read, args=(rank.log,), daemon=True)
        self._reader.start()

    def _read(self, log: Path | None) -> None:
        """Passes on the rank's stderr, and keeps the lines of srun."""
        assert self.stderr is not None
        terminal = contextlib.nullcontext(sys.stderr.buffer)
        with terminal if log is None else log.open("ab") as out, self.stderr as pipe:
            for own, piece in split_lines(iter(lambda: os.read(pipe.fileno(), 65536), b"")):
                if own:
                    self._hear(piece.decode(errors="replace").strip())
                else:
                    out.write(piece)
                    out.flush()

    def _hear(self, line: str) -> None:
        said = re.fullmatch(r"(?:srun|slurmstepd[^:]*): (error: |fatal: )?(.*)", line)
        level, message = said.groups() if said else ("", "")
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
        code = super().poll()
        if code is not None and code > 128 and code != 130:  # the rank's signal, as a shell says it
            return 128 - code
        return code

    def send_signal(self, sig: int) -> None:
        if not self._signal_step(sig):
            super().send_signal(signal.SIGTERM)  # srun then ends what it waits for

    def kill(self) -> None:
        self._signal_step(signal.SIGKILL)
        super().send_signal(signal.SIGKILL)

    def _signal_step(self, sig: int) -> bool:
        """Returns whether the rank has got the signal. It must have entered the run."""
        try:
            step = json.loads(self._entered.read_text(encoding="utf-8"))["step"]
            _run("scancel", f"--signal={signal.Signals(sig).name[3:]}", step)
        except (OSError, ValueError, LookupError, RunError):
            return False
        return True


def split_lines(chunks: Iterable[bytes]) -> Iterator[tuple[bool, bytes]]:
    """Separates the lines of srun from the rank's output. Yields them, with True for srun's.

    Unfinished lines of the rank pass at once.

    Example:
        >>> list(split_lines([b"step 1\\nsrun: err", b"or: no\\nstep"]))
        [(False, b'step 1\\n'), (True, b'srun: error: no\\n'), (False, b'step')]
    """
    held, inside = b"", False  # the start of a line of srun, and whether in a line of the rank
    for chunk in chunks:
        for line in (held + chunk).splitlines(keepends=True):
            whole = line.endswith((b"\n", b"\r"))
            own = not inside and line.startswith(_OWN)
            perhaps = not inside and any(prefix.startswith(line) for prefix in _OWN)
            held = b"" if whole or not (own or perhaps) else line
            if not held:
                yield own, line
                inside = not whole
    if held:
        yield held.startswith(_OWN), held


def _run(*command: str, folder: Path | None = None) -> str:
    name = " ".join(command[:2])
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_LIMIT)
    except OSError as error:
        raise RunError(f"{name} cannot be run: {error}") from None
    except subprocess.TimeoutExpired:
        raise RunError(f"the launcher waited {_LIMIT:g} s for {name}") from None
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())
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
        self._size, self._folder, self._job_options = size, folder, job_options
        self._job = os.environ.get("SLURM_JOB_ID")
        self._nodes: list[str] = []
        self._steps: list[SlurmProcess] = []
        self._resizing = threading.Lock()
        where = f"job {self._job}"
        try:
            if self._job is None:
                where = "no allocation (SLURM_JOB_ID) and no controller"
                answer = _run("scontrol", "ping")
                if "UP" not in answer:
                    raise RunError(" ".join(answer.split()))
            else:
                nodes = os.environ.get("SLURM_JOB_NODELIST", "")
                self._nodes = _run("scontrol", "show", "hostnames", nodes).split()
        except RunError as error:
            raise ConfigError(f"--launcher slurm: {where}: {error}") from None

    def start(self, rank: RankCommand) -> RankProcess:
        if self._job is None or rank.joins:
            env = own_job_environment(rank.environment) | _local_ranks(0, 1)
            name = f"--job-name={'dynmo-join' if rank.joins else 'dynmo'}"
            return SlurmProcess(rank, [name, *self._job_options], env, None)
        # A node has as many ranks as the others, in order. They share its devices, as under
        # torchrun.
        size, nodes = self._size, self._nodes[: self._size]
        node_of = [nodes[each * len(nodes) // size] for each in range(size)]
        node = node_of[rank.process]
        place = (node_of[: rank.process].count(node), node_of.count(node))
        env = {**rank.environment, **_local_ranks(*place)}
        options = [f"--job-name=dynmo-{rank.process}", "--overlap", f"--nodelist={node}"]
        self._steps.append(SlurmProcess(rank, options, env, node))
        return self._steps[-1]

    def give_back(self, processes: Sequence[RankProcess]) -> str:
        ended = [process for process in processes if isinstance(process, SlurmProcess)]
        jobs = sum(process.node is None for process in ended)
        told = [f"{jobs} job{'s' * (jobs > 1)} ended"] * (jobs > 0)
        nodes = sorted({process.node for process in ended if process.node is not None})
        with self._resizing:
            shared = {step.node for step in self._steps if step.poll() is None}
            own = os.environ.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0]
            free = [node for node in nodes if node not in {own, *shared}]
            if free:
                stay = [node for node in self._nodes if node not in free]
                # scontrol writes a script that corrects the environment of a shell into its folder.
                folder = self._folder if self._folder.is_dir() else None
                listed = f"NodeList={','.join(stay)}"
                _run("scontrol", "update", f"JobId={self._job}", listed, folder=folder)
                self._nodes = stay
                told.append(f"job {self._job} gave back {', '.join(free)}")
        told += [
            f"{node} cannot be given back until its last rank leaves"
            if node in shared
            else f"{node} stays: the launcher runs there"
            for node in nodes
            if node not in free
        ]
        if not free and not jobs:
            raise RunError("; ".join(told))
        return "; ".join(told)

    def close(self) -> None:
        pass


def own_job_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment without the current allocation, for a job of its own."""
    devices = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
    inside = "SLURM_JOB_ID" in environ
    return {
        name: value
        for name, value in environ.items()
        if name == "SLURM_CONF"
        or not (name.startswith(("SLURM_", "SLURMD_")) or (inside and name in devices))
    }


def _local_ranks(rank: int, size: int) -> dict[str, str]:
    return {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
