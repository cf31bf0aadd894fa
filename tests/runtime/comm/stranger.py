"""A process of this machine that does not know the token of a run, and attacks it.

python -m tests.runtime.comm.stranger gloo PROCESS_GROUP
python -m tests.runtime.comm.stranger store PORT
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any


def listeners(group: int) -> Iterator[int]:
    """The new ports on which a process group or children listen, and 0 after each look."""
    known, processes, looked = set[str](), list[str](), 0.0
    while True:
        if time.monotonic() - looked > 0.1:
            processes = [each for each in _numbers("/proc") if _is_in(each, group)]
            looked = time.monotonic()
            if not processes:
                return
        rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        new = {row[9]: row[1] for row in rows if row[3] == "0A" and row[1].startswith("0100007F")}
        new = {inode: at for inode, at in new.items() if inode not in known}
        own = {file for each in processes for file in _files(each)} if new else set[str]()
        for inode in [each for each in new if f"socket:[{each}]" in own]:
            known.add(inode)
            yield int(new[inode].split(":")[1], 16)
        yield 0


def _numbers(folder: str) -> list[str]:
    return [each.name for each in Path(folder).iterdir() if each.name.isdigit()]


def _is_in(process: str, group: int) -> bool:
    with contextlib.suppress(OSError):
        parent = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1]
        return group in (os.getpgid(int(process)), int(parent))
    return False


def _files(process: str) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for each in _numbers(f"/proc/{process}/fd"):
            with contextlib.suppress(OSError):
                yield str(Path(f"/proc/{process}/fd/{each}").readlink())


def take_places(group: int) -> dict[str, int]:
    """Says small numbers at each port, and answers what gloo asks with zeros."""
    selector, places, given, read = selectors.DefaultSelector(), 0, 0, 0
    ended = list[int]()
    signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
    for port in listeners(group):
        if ended:
            break
        for number in range(8 if port else 0):
            with contextlib.suppress(OSError):
                peer = socket.create_connection(("127.0.0.1", port), 1)
                peer.sendall(struct.pack("<q", number))
                peer.settimeout(0.2)
                selector.register(peer, selectors.EVENT_READ, peer)
                places += 1
        for key, _ in selector.select(0) if selector.get_map() else ():
            answered = _answer(key.data)
            if answered is None:
                selector.unregister(key.fileobj)
                key.data.close()
            else:
                given, read = given + answered[0], read + answered[1]
    return {"connections": places, "bytes given": given, "bytes read": read}


def _answer(peer: Any) -> tuple[int, int] | None:
    try:
        head = peer.recv(48, socket.MSG_WAITALL)
        if len(head) < 48:
            return None
        size, kind, slot, _, length, _ = struct.unpack("<6Q", head)
        if kind < 2:  # data
            return 0, len(peer.recv(size - 48, socket.MSG_WAITALL))
        if kind == 2:  # it has data
            peer.sendall(struct.pack("<6Q", 48, 3, slot, 0, length, 0))
            return 0, 0
        peer.sendall(struct.pack("<6Q", 48 + length, 1, slot, 0, length, 0) + bytes(length))
        return length, 0
    except OSError:
        return None


def write_keys(port: int) -> dict[str, int]:
    """Writes what ranks once acted on, or would act on now, until the store is gone."""
    import torch.distributed as dist

    written, limit = 0, timedelta(seconds=20)
    with contextlib.suppress(RuntimeError):
        store: Any = dist.TCPStore(
            "127.0.0.1", port, is_master=False, timeout=limit, wait_for_workers=False
        )
        home = "attempt/0/gen/0"
        told = json.dumps({"kind": "final", "text": "the stranger says so"})
        store.wait([f"{home}/try/0/proved/all"], limit)
        store.set(f"{home}/join/tickets", "100000000000")
        for number in range(1, 10**9):
            if number <= 40:  # more would leave no ticket to newcomers
                store.set(f"{home}/join/ticket/{number}", "1" * (8 << 10))
                store.set(f"{home}/join/here/{number}", "{}")
            for rank in (0, 1):
                store.set(f"{home}/gave up/{rank}", told)
                store.set(f"{home}/again/{number}/gave up/{rank}", told)
            store.set(f"{home}/join/over", "1")
            written += 5 + 2 * (number <= 40)
            time.sleep(0.02)
    return {"keys": written}


if __name__ == "__main__":
    act = take_places if sys.argv[1] == "gloo" else write_keys
    print(json.dumps(act(int(sys.argv[2]))))
