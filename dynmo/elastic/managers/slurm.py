"""Starts ranks through Slurm's `srun`.

    inside of an allocation    one step per rank. A node is given back when its last rank has left
    outside                    one job per rank. A job frees its node as it ends
    newcomers                  one job per rank, in both cases. They may be pending for hours.
                               In place of a rank that died in the allocation: a step on its node

Ranks run as steps that share their node (`--overlap`), so that several of them see all its devices.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from dynmo.elastic.manager import RankCommand, RankProcess, own_node
from dynmo.errors import ConfigError, RunError

# Seconds that a command of Slurm may take.
_LIMIT = 60.0
# A node of the allocation, a local rank there, and how many ranks the node has.
_Place = tuple[str, int, int]
# A line of srun, or of its node daemon, among the output of the rank.
_OWN = re.compile(rb"^(?:srun|slurmstepd[^:\n]*): (error: |fatal: )?(.*)\n?", re.MULTILINE)
# Messages that repeat the status.
_STATUS_ONLY = re.compile(r"task 0: |\*\*\* (STEP|JOB) ")
# A rank that fails must not end the others.
_SRUN = (
    *("srun", "--nodes=1", "--ntasks=1", "--export=ALL", "--input=none", "--mpi=none"),
    *("--cpu-bind=none", "--kill-on-bad-exit=0"),
)


class SlurmProcess(subprocess.Popen[bytes]):
    """A rank that runs under its own `srun`. Its place is None if it has a job of its own."""

    def __init__(
        self,
        rank: RankCommand,
        options: Sequence[str],
        env: Mapping[str, str],
        place: _Place | None,
    ) -> None:
        self.place, self._rank = place, rank
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
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        """Passes on the rank's stderr, and keeps the lines of srun. It writes each at once."""
        assert self.stderr is not None
        terminal, log = contextlib.nullcontext(sys.stderr.buffer), self._rank.log
        with terminal if log is None else log.open("ab") as out, self.stderr as pipe:
            while chunk := os.read(pipe.fileno(), 65536):
                out.write(_OWN.sub(self._take_line, chunk))
                out.flush()

    def _take_line(self, line: re.Match[bytes]) -> bytes:
        level, message = line[1], line[2].decode(errors="replace").strip()
        if self._rank.process == 0 and "queued and waiting" in message:
            print(f"dynmo: rank 0: {message}", file=sys.stderr)
        if level and message not in self._errors and not _STATUS_ONLY.search(message):
            self._errors.append(message)
        return b""

    def reason(self) -> str:
        self._reader.join(1.0)
        return "; ".join(self._errors)

    def poll(self) -> int | None:
        code = super().poll()
        if code is not None and code > 128 and code != 130:  # the rank's signal, as a shell says it
            return 128 - code
        return code

    @property
    def node(self) -> str | None:
        return None if self.place is None else self.place[0]

    @property
    def died(self) -> bool:
        """Whether it ran, and ended neither well nor on request."""
        return self.poll() not in (None, 0, 130) and self._rank.entered.exists()

    def send_signal(self, sig: int) -> None:
        try:
            step = json.loads(self._rank.entered.read_text(encoding="utf-8"))["step"]
            _run("scancel", f"--signal={signal.Signals(sig).name[3:]}", step)
        except (OSError, RunError):  # the rank has not entered the run
            super().send_signal(signal.SIGTERM)  # srun then ends what it waits for

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
        super().send_signal(signal.SIGKILL)


def _run(*command: str, folder: Path | None = None) -> str:
    name = " ".join(command[:2])
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_LIMIT)
    except (OSError, subprocess.TimeoutExpired) as error:
        is_absent = isinstance(error, FileNotFoundError) and error.filename == command[0]
        why = "Slurm is not installed on this machine" if is_absent else error
        raise RunError(f"the launcher cannot run {name}: {why}") from None
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())
        raise RunError(f"{name} failed: {said or f'status {done.returncode}'}")
    return done.stdout


class SlurmStarter:
    """Starts ranks as steps of the current allocation, or as jobs of their own."""

    def __init__(self, folder: Path, job_options: Sequence[str] = ()) -> None:
        """Looks at the allocation.

        Args:
            folder: The launch folder, which takes the files of `scontrol`.
            job_options: Options of `srun` for jobs of one rank: partition, devices, time limit.

        Raises:
            ConfigError: Slurm is not installed here, or its controller does not answer.
        """
        self._folder, self._job_options = folder, job_options
        self._job = os.environ.get("SLURM_JOB_ID")
        self._started: list[SlurmProcess] = []
        listed = os.environ.get("SLURM_JOB_NODELIST", "")
        asked = ("partition",) if self._job is None else ("hostnames", listed)
        try:
            self._nodes = _run("scontrol", "show", *asked).split()
        except RunError as error:
            where = f"job {self._job}" if self._job else "no allocation (SLURM_JOB_ID)"
            advice = "leave out --launcher to start the ranks on this machine"
            raise ConfigError(f"--launcher slurm: {where}: {error}; {advice}") from None

    def start(self, rank: RankCommand) -> RankProcess:
        place = self._place(rank)
        if place is None:
            env = own_job_environment(rank.environment)
            options = [f"--job-name={'dynmo-join' if rank.joins else 'dynmo'}", *self._job_options]
            local_rank, local_size = 0, 1
        else:
            env, (node, local_rank, local_size) = dict(rank.environment), place
            options = [f"--job-name=dynmo-{rank.process}", "--overlap", f"--nodelist={node}"]
        env |= {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(local_size)}
        self._started.append(SlurmProcess(rank, options, env, place))
        return self._started[-1]

    def _place(self, rank: RankCommand) -> _Place | None:
        """Returns a place in the allocation. None if the rank is a job of its own."""
        if self._job is None:
            return None
        if not rank.joins:
            node_of = self._node_of(int(rank.environment["WORLD_SIZE"]))
            node = node_of[rank.process]
            return node, node_of[: rank.process].count(node), node_of.count(node)
        dead = next(
            (each for each in self._started if each.died and each.node in self._nodes), None
        )
        if dead is None:
            return None
        self._started.remove(dead)  # its place is taken
        return dead.place

    def _node_of(self, size: int) -> list[str]:
        """Returns the node of each rank.

        A node has as many ranks as the others, in order. They share its devices, as under torchrun.
        """
        nodes = self._nodes[:size]
        return [nodes[each * len(nodes) // size] for each in range(size)]

    def ranks_left(self, size: int) -> int:
        if self._job is None:  # a job waits for a node that works
            return size
        # Slurm takes a node that is down from a job that may go on without it.
        listed = _run("squeue", "--noheader", f"--jobs={self._job}", "--format=%N").strip()
        has = _run("scontrol", "show", "hostnames", listed).split()
        left = sum(node in has for node in self._node_of(size))
        self._nodes = [node for node in self._nodes if node in has]
        return left

    def give_back(self, processes: Sequence[RankProcess]) -> str:
        own = [process for process in processes if isinstance(process, SlurmProcess)]
        dead = [process.node for process in own if process.node is not None and process.died]
        ended = [process.node for process in own if process.node is None or not process.died]
        # Outside of a step of Slurm (a shell of ssh, say) the node is known by its host name.
        here = own_node(), own_node().partition(".")[0]
        why = dict.fromkeys(here, "while the launcher runs there")
        running = [process.node for process in self._started if process.poll() is None]
        why |= dict.fromkeys(running, "until its last rank leaves")
        kept = [f"{node} is kept for a rank in place of the dead one" for node in dead]
        nodes, jobs = sorted({node for node in ended if node is not None}), ended.count(None)
        lines = [f"{node} cannot be given back {why[node]}" for node in nodes if node in why]
        free = [node for node in nodes if node not in why]
        if not free and not jobs and not kept:
            raise RunError("; ".join(lines))
        if free:
            stay = [node for node in self._nodes if node not in free]
            # scontrol writes a script that corrects the environment of a shell into its folder.
            change = (f"JobId={self._job}", f"NodeList={','.join(stay)}")
            _run("scontrol", "update", *change, folder=self._folder)
            self._nodes = stay
            lines.insert(0, f"job {self._job} gave back {', '.join(free)}")
        return "; ".join([*[f"{jobs} job{'s' * (jobs > 1)} ended"] * (jobs > 0), *kept, *lines])


def own_job_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment without the current allocation, for a job of its own."""
    devices = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
    inside = devices if "SLURM_JOB_ID" in environ else ()
    prefixes = ("SLURM_", "SLURMD_", *inside)
    return {k: v for k, v in environ.items() if k == "SLURM_CONF" or not k.startswith(prefixes)}
