"""Checks the interface on which ranks connect, and the port on which they meet."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Sequence

import psutil
import torch.distributed as dist

from dynmo.doctor.finding import Finding, State
from dynmo.errors import first_line
from dynmo.runtime.comm.rendezvous import Rendezvous, is_loopback

_VARIABLE = "GLOO_SOCKET_IFNAME"
_PATIENCE = 3.0  # seconds for a connection within this machine
_PORT = "29500"  # torchrun's default


def check_network(rendezvous: Rendezvous | None) -> Iterator[Finding]:
    """Checks what gloo would use.

    Args:
        rendezvous: Where a launcher's ranks meet. None: dynmo starts them on this machine.
    """
    if rendezvous is None and sys.platform == "linux":  # the launcher names it to the ranks
        yield _of_interfaces("interface of local ranks", ["lo"])
    check = "interface between machines" if rendezvous is None else "interface"
    is_local = rendezvous is not None and (rendezvous.local or rendezvous.loopback)
    named = [name for name in os.environ.get(_VARIABLE, "").split(",") if name]
    host = socket.gethostname()
    found = _interface_at(_address_of(host)) or "lo"  # as gloo takes it
    if named or is_local or not _is_loopback(found):
        yield _of_interfaces(check, named or [found])
    else:
        seen = f"the host name {host} leads to no address that other machines reach"
        others = [name for name in _usable() if not _is_loopback(name)]
        remedy = f"for ranks on several machines set {_VARIABLE} to one of {', '.join(others)}"
        state = State.ok if rendezvous is None else State.problem
        yield Finding(check, state, seen, remedy if others else "connect it to a network")
    if rendezvous is None:
        yield _of_port(os.environ.get("MASTER_PORT") or _PORT)


def _of_interfaces(check: str, names: Sequence[str]) -> Finding:
    """Checks that interfaces are up, that gloo takes them, and that they carry a connection."""
    known = psutil.net_if_stats()
    for name in names:
        if name not in known:
            seen = f"{_VARIABLE} = {os.environ.get(_VARIABLE)}: there is no interface {name}"
            remedy = f"unset it, or set it to one of {', '.join(_usable())}"
            return Finding(check, State.problem, seen, remedy)
        if not known[name].isup or not _addresses(name):
            why = "has no address" if known[name].isup else "is down"
            remedy = f"ip link set {name} up" if not known[name].isup else f"give {name} an address"
            others = [each for each in _usable() if each != name]
            if name in os.environ.get(_VARIABLE, "") and others:
                remedy += f", or set {_VARIABLE} to one of {', '.join(others)}"
            return Finding(check, State.problem, f"{name} {why}", remedy)
        try:
            _talk(_addresses(name)[0])
            dist.ProcessGroupGloo.create_device(interface=name)
        except (OSError, RuntimeError) as error:
            seen = f"a connection at {_addresses(name)[0]} ({name}) fails: {first_line(error)}"
            remedy = f"let the firewall pass TCP between the ports of {name}"
            return Finding(check, State.problem, seen, remedy)
    at = {name: _addresses(name)[0] for name in names}
    seen = ", ".join(f"{name} ({address})" for name, address in at.items())
    return Finding(check, State.ok, f"{seen} listens and connects", figures=at)


def _talk(address: str) -> None:
    """Sends a byte from this machine to itself. Raises OSError if it does not come."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as server:
        server.settimeout(_PATIENCE)
        with socket.create_connection(server.getsockname(), _PATIENCE) as client:
            end, _ = server.accept()
            with end:
                client.sendall(b"1")
                end.settimeout(_PATIENCE)
                end.recv(1)


def _addresses(name: str) -> list[str]:
    """Returns the addresses of an interface, those of version 4 first."""
    families = (socket.AF_INET, socket.AF_INET6)
    found = [each for each in psutil.net_if_addrs().get(name, ()) if each.family in families]
    return [each.address for each in sorted(found, key=lambda each: families.index(each.family))]


def _is_loopback(name: str) -> bool:
    return all(is_loopback(address) for address in _addresses(name)[:1])


def _usable() -> list[str]:
    stats = psutil.net_if_stats()
    return [name for name in stats if stats[name].isup and _addresses(name)]


def _address_of(host: str) -> str | None:
    try:
        return socket.gethostbyname(host)
    except OSError:
        return None


def _interface_at(address: str | None) -> str | None:
    return next((name for name in _usable() if address in _addresses(name)), None)


def _of_port(port: str) -> Finding:
    if not (port.isdecimal() and 0 < int(port) < 1 << 16):
        seen = f"MASTER_PORT = {port} is no port"
        return Finding("port", State.warning, seen, "unset it, or set it to 1 to 65535")
    try:
        socket.create_server(("", int(port))).close()
    except OSError as error:
        seen = f"port {port} of torchrun cannot be used: {error.strerror}"
        remedy = "start torchrun with --standalone, or with another --master-port"
        return Finding("port", State.warning, seen, remedy)
    return Finding("port", State.ok, f"port {port} is free for torchrun")
