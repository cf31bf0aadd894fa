"""A real Slurm cluster of several nodes on this machine, for a test.

    with slurm_cluster() as slurm:
        slurm.submit(["python", "program.py"], nodes=4, name="train", out=folder / "out")
        slurm.states()      # {"train": "RUNNING"}

Everything is on 127.0.0.1. Only processes are stopped whose pid files lie in the cluster's folder.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.elastic.started import StartedProcesses
from tests.processes import wait_until

_CONF = """
ClusterName=t
SlurmctldHost=localhost
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/m.sock
CredType=cred/munge
SlurmctldPort={port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/log/ctld.log
SlurmdLogFile={folder}/log/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0,sched_min_interval=0
KillWait=3
GresTypes=gpu
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
{nodes}
PartitionName=p Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
_PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "squeue", "scancel")
_PATH = os.environ["PATH"] + ":/usr/sbin:/sbin"


def why_no_slurm() -> str | None:
    """Returns why no cluster can be started here. None: it can."""
    missing = [name for name in _PROGRAMS if shutil.which(name, path=_PATH) is None]
    if missing:
        return f"Slurm is not installed ({', '.join(missing)} missing)"
    return None if os.geteuid() == 0 else "Slurm's daemons need root here"


class SlurmCluster(StartedProcesses):
    """A running cluster.

    Attributes:
        folder: Its configuration, logs and state.
        nodes: Names of its nodes.
        env: The environment of a process outside of any job.
    """

    def __init__(self, folder: Path, nodes: Sequence[str]) -> None:
        super().__init__()
        self.folder = folder
        self.nodes = list(nodes)
        outside = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
        self.env = {**outside, "PATH": _PATH, "SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *command: str) -> str:
        """Runs a command of Slurm. Returns its output."""
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, f"{command}: {done.stderr}{self.logs()}"
        return done.stdout

    def environment(self) -> dict[str, str]:
        return self.env

    def submit(
        self,
        command: Sequence[str],
        nodes: int,
        name: str,
        out: Path,
        env: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
    ) -> int:
        """Submits a batch job."""
        given = [f"export {key}={shlex.quote(value)}\n" for key, value in (env or {}).items()]
        script = self.folder / f"{name}.sh"
        script.write_text(f"#!/bin/sh\n{''.join(given)}exec {shlex.join(command)}\n")
        where = [f"--nodes={nodes}", f"--job-name={name}", f"--output={out}", "--parsable"]
        return int(self.run("sbatch", *where, *options, str(script)))

    def states(self) -> dict[str, str]:
        """Returns the state of every job by its name, without jobs that have ended."""
        lines = self.run("squeue", "--noheader", "--format=%j %T").splitlines()
        return dict(line.split() for line in lines)

    def nodes_of(self, job: int) -> list[str]:
        """Returns the nodes of a job that runs."""
        listed = self.run("squeue", "--noheader", f"--jobs={job}", "--format=%N").strip()
        return self.run("scontrol", "show", "hostnames", listed).split()

    def wait_for_state(self, name: str, state: str | None, seconds: float = 90.0) -> None:
        """Waits until a job has a state. None waits until it has ended."""
        wait_until(lambda: self.states().get(name) == state, seconds)

    def logs(self) -> str:
        """Returns the end of every daemon's log, for the message of a failed test."""
        files = sorted((self.folder / "log").glob("*.log"))
        return "".join(f"\n-- {file.name}\n{file.read_text()[-1500:]}" for file in files)


@contextlib.contextmanager
def slurm_cluster(nodes: int = 4) -> Iterator[SlurmCluster]:
    """Starts a cluster, and stops it at the end with all of its jobs.

    Each node has one core, and one GPU that does not exist.
    """
    # The path of a socket may have some 100 characters: a test's own folder is too deep.
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    cluster = SlurmCluster(folder, [f"n{number}" for number in range(1, nodes + 1)])
    try:
        _configure(cluster)
        try:
            _start(cluster)
            yield cluster
        finally:
            cluster.end_started()
            _stop(cluster)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _configure(cluster: SlurmCluster) -> None:
    folder = cluster.folder
    for name in ("munge", "state", "spool", "log"):
        (folder / name).mkdir()
    (folder / "munge/key").write_bytes(secrets.token_bytes(128))
    (folder / "munge/key").chmod(0o600)
    # A GPU that is /dev/zero cannot be told from another: one file for all nodes.
    os.mknod(folder / "gpu0", 0o666 | 0o020000, os.makedev(1, 3))
    names = f"n[1-{len(cluster.nodes)}]"
    (folder / "gres.conf").write_text(f"NodeName={names} Name=gpu File={folder}/gpu0\n")
    port, *others = _free_ports(1 + len(cluster.nodes))
    host = "NodeHostname=localhost NodeAddr=127.0.0.1"
    has = "CPUs=1 RealMemory=4000 Gres=gpu:1 State=UNKNOWN"
    pairs = zip(cluster.nodes, others, strict=True)
    lines = [f"NodeName={node} {host} Port={other} {has}" for node, other in pairs]
    text = _CONF.format(folder=folder, port=port, nodes="\n".join(lines))
    (folder / "slurm.conf").write_text(text)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in opened]


def _start(cluster: SlurmCluster) -> None:
    munge = cluster.folder / "munge"
    files = ("socket=m.sock", "key-file=key", "pid-file=pid", "log-file=log", "seed-file=seed")
    named = [file.partition("=") for file in files]
    cluster.run("munged", "--force", *[f"--{option}={munge / name}" for option, _, name in named])
    cluster.run("slurmctld", "-c")
    for node in cluster.nodes:
        cluster.run("slurmd", "-N", node)

    def all_idle() -> bool:
        listed = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--format=%t"],
            env=cluster.env,
            capture_output=True,
            text=True,
            timeout=30,
        )
        return listed.stdout.split() == ["idle"] * len(cluster.nodes)

    wait_until(all_idle, 60)


def _stop(cluster: SlurmCluster) -> None:
    with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
        cluster.run("scancel", "--user=root")
        wait_until(lambda: not cluster.states(), 10)
    folder = cluster.folder
    for file in [*folder.glob("slurmd.*.pid"), folder / "slurmctld.pid", folder / "munge/pid"]:
        with contextlib.suppress(OSError, ValueError):
            pid = int(file.read_text())
            os.kill(pid, signal.SIGTERM)
            with contextlib.suppress(AssertionError):
                wait_until(lambda pid=pid: not _lives(pid), 5)
            if _lives(pid):
                os.kill(pid, signal.SIGKILL)


def _lives(pid: int) -> bool:
    """A process that nobody has waited for has ended, too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
