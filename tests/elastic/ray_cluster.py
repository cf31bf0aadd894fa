"""A real Ray cluster on this machine for a test.

It is in a network namespace that has only `lo`.

    with ray_cluster(gpus=4) as cluster:
        process = cluster.start(["python", "program.py"], folder)     # inside of the namespace

Ray listens on the address of the host. In the namespace there is none but 127.0.0.1. Only processes
of the namespace are stopped: those that the cluster has started.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.elastic.started import StartedProcesses
from tests.processes import wait_until

# The first process: it brings `lo` up, starts the head, and ends it when its input closes.
_HEAD = """
import json, subprocess, sys
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
import ray
options = json.loads(sys.argv[1])
context = ray.init(address="local", include_dashboard=False, log_to_driver=False, **options)
print(context.address_info["gcs_address"], flush=True)
sys.stdin.read()
ray.shutdown()
"""


def why_no_ray() -> str | None:
    """Returns why no cluster can be started here. None: it can."""
    if importlib.util.find_spec("ray") is None:
        return "Ray is not installed"
    missing = [name for name in ("unshare", "nsenter", "ip") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} missing"
    if os.geteuid() != 0:
        return "a network namespace needs root here"
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, timeout=10)
    return None if tried.returncode == 0 else "no network namespace can be made here"


class RayCluster(StartedProcesses):
    """A running cluster.

    Attributes:
        address: Its address inside of the namespace.
    """

    def __init__(self, head: subprocess.Popen[str], address: str) -> None:
        super().__init__()
        self.address = address
        self._head = head

    def inside(self, command: Sequence[str]) -> Sequence[str]:
        return ["nsenter", f"--net=/proc/{self._head.pid}/ns/net", *command]

    def environment(self) -> dict[str, str]:
        # Ray itself warns as it is imported.
        own = {"RAY_ADDRESS": self.address, "PYTHONWARNINGS": "default"}
        return {**RAY_ENV, **own, "MASTER_ADDR": "127.0.0.1"}


RAY_ENV = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}


def without_warning(text: str) -> str:
    """Returns the output of a process without one warning of Ray.

    The warning says that there is no way to the outside.
    """
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if "] network_util.cc:" not in line)


@contextlib.contextmanager
def ray_cluster(gpus: int = 4) -> Iterator[RayCluster]:
    """Starts a cluster of one machine, and stops it at the end."""
    # The path of a socket may have some 100 characters: a test's own folder is too deep.
    folder = Path(tempfile.mkdtemp(prefix="ray-"))
    options = {"num_cpus": 1, "num_gpus": gpus, "object_store_memory": 100 * 2**20}
    options |= {"_temp_dir": str(folder)}
    with (folder / "head.log").open("w") as log:
        head = subprocess.Popen(
            ["unshare", "--net", sys.executable, "-c", _HEAD, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **RAY_ENV},
            start_new_session=True,
        )
    assert head.stdin is not None
    assert head.stdout is not None
    try:
        address = head.stdout.readline().strip()
        assert address, (folder / "head.log").read_text()
        namespace = Path(f"/proc/{head.pid}/ns/net").readlink()
        cluster = RayCluster(head, address)
        try:
            yield cluster
        finally:
            cluster.end_started()
            head.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                head.wait(20)
            _end(namespace)
    finally:
        head.kill()
        head.wait()
        head.stdout.close()
        shutil.rmtree(folder, ignore_errors=True)


def _end(namespace: Path) -> None:
    """Ends what is left in the namespace. All of it was started here."""
    for pid in _inside(namespace):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not _inside(namespace), 10)


def _inside(namespace: Path) -> list[int]:
    pids: list[int] = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and (entry / "ns/net").readlink() == namespace:
                pids.append(int(entry.name))
    return pids
