"""Two hosts as network namespaces of this machine. Needs root.

Each has one end of a cable. The launcher and the ranks of even numbers are on the first host, the
other ranks on the second.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

CABLE = "cable"
FIRST, SECOND = "10.69.0.1", "10.69.0.2"
_NEWNET = 0x40000000
_RATE = ("rate", "64kbit", "burst", "3kb", "latency", "4s")


def why_not() -> str:
    """Returns why this machine has no such hosts, or an empty string."""
    if os.geteuid():
        return "needs root"
    try:
        with two_hosts(99):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no network namespaces ({error})"


@contextmanager
def two_hosts(number: int) -> Generator[list[str]]:
    """Makes two hosts with a cable, and yields their names."""
    names = [f"faults-{number}{letter}" for letter in "ab"]
    for name in names:
        subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)
    try:
        for name in names:
            _ip("netns", "add", name)
        ends = ["name", CABLE, "netns", names[0], "type", "veth"]
        _ip("link", "add", *ends, "peer", "name", CABLE, "netns", names[1])
        for name, address in zip(names, (FIRST, SECOND), strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", CABLE)
            for link in (CABLE, "lo"):
                _ip("-n", name, "link", "set", link, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def enter(name: str) -> None:
    """Moves this process to a host."""
    file = os.open(f"/run/netns/{name}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(file, _NEWNET):
        raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {name}")
    os.close(file)


def enter_launcher(names: Sequence[str]) -> None:
    """Moves the launcher to the first host, where its store gets that host's address."""
    enter(names[0])
    os.environ["MASTER_ADDR"] = FIRST
    os.environ["DYNMO_FAULTS_HOSTS"] = " ".join(names)


def enter_rank() -> None:
    """Moves a rank to its host, if there are several."""
    if "DYNMO_FAULTS_HOSTS" in os.environ:
        names = os.environ["DYNMO_FAULTS_HOSTS"].split()
        at = int(os.environ["DYNMO_PROCESS"]) % 2
        enter(names[at])
        os.environ["GLOO_SOCKET_IFNAME"] = CABLE
        os.environ["SLURMD_NODENAME"] = names[at]


def disturb(kind: str, name: str = "") -> None:
    """Cuts the cable, or makes it slow. Without a name this process is on a host."""
    on = ("-n", name) if name else ()
    if kind == "cut network":
        _ip(*on, "link", "set", CABLE, "down")
    else:
        command = ["tc", *on, "qdisc", "replace", "dev", CABLE, "root", "tbf", *_RATE]
        subprocess.run(command, check=True, capture_output=True)


def heal(name: str) -> None:
    """Mends the cable."""
    _ip("-n", name, "link", "set", CABLE, "up")
    command = ["tc", "-n", name, "qdisc", "del", "dev", CABLE, "root"]
    subprocess.run(command, check=False, capture_output=True)


def exist(folder: Path) -> bool:
    return folder.is_dir()
