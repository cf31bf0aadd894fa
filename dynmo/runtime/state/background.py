"""A process beside a rank that writes files, so that a step does not wait for the disk.

    rank    copies tensors into a file in memory, and sends it through a socket
    writer  writes the parts of it to files, syncs them and answers with the SHA-256 of each

The writer loads neither torch nor dynmo, because Python starts it by this file's path. It ends soon
after its rank, with or without what it was writing.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

CAN_WRITE = sys.platform == "linux"
"""Whether this system has files in memory, and sockets that keep messages apart."""

_VARIABLES = ("LD_LIBRARY_PATH", "PATH")  # what Python itself needs
_PIECE = 1 << 23  # bytes between two looks whether the rank lives
_WORDS = 1 << 12  # bytes of a message, and of an answer without hashes, at most
_DIGEST = hashlib.sha256().digest_size
_GROUP = Path("/sys/fs/cgroup")


# -- the rank --------------------------------------------------------------------------------------


class Writer:
    """The process that writes for this one."""

    def __init__(self) -> None:
        self.works_on: MemoryFiles | None = None
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, contextlib.ExitStack() as undo:
            undo.enter_context(self.socket)
            self.process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                cwd="/",
                env={key: os.environ[key] for key in _VARIABLES if key in os.environ},
                start_new_session=True,  # Ctrl-C in a terminal reaches every process of a session
            )
            undo.pop_all()

    @property
    def is_closed(self) -> bool:
        return self.socket.fileno() < 0

    def close(self) -> None:
        """Ends the process. It finishes what it writes."""
        self.socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        self.process.kill()
        self.process.wait()


_writer: Writer | None = None


def _running() -> Writer:
    global _writer
    if _writer is None:
        _writer = Writer()
        atexit.register(_end)
    return _writer


def _end() -> None:
    global _writer
    atexit.unregister(_end)
    if _writer is not None:
        _writer.close()
        _writer = None


class MemoryFiles:
    """Files that are copied into memory now, and written by the writer later.

    Attributes:
        memory: Takes the content of one file after the other.
    """

    def __init__(self) -> None:
        self.memory: IO[bytes] = os.fdopen(os.memfd_create("checkpoint"), "w+b")
        self._ends: list[tuple[str, int]] = []
        self._answer: bytes | None = b"+"  # None once a writer has them
        self._writer: Writer | None = None  # that one

    def end_file(self, path: Path) -> None:
        """Ends the content of the file that will be at `path`."""
        self._ends.append((str(path.absolute()), self.memory.tell()))

    @property
    def bytes(self) -> int:
        return self._ends[-1][1] if self._ends else 0

    def send(self) -> None:
        """Has the writer write the files. This process then drops them.

        Raises:
            OSError: No process could be started, or the one that was there has ended.
        """
        self.memory.seek(self.bytes)  # without what a file that failed has left
        self.memory.write(json.dumps(self._ends).encode())
        words = json.dumps([self.bytes, self.memory.tell()]).encode()
        self.memory.flush()
        with self.memory:
            if _writer is not None and _writer.works_on is not None:
                with contextlib.suppress(OSError):  # an error for who sent them
                    _writer.works_on.digests()
            for again in (True, False):
                writer = _running()
                try:
                    socket.send_fds(writer.socket, [words], [self.memory.fileno()])
                except ConnectionError:
                    _end()  # it was killed while it had nothing to do
                    if not again:
                        raise
                else:
                    writer.works_on, self._writer, self._answer = self, writer, None
                    return

    @property
    def are_written(self) -> bool:
        """Whether `digests` returns at once."""
        if self._answer is not None or self._writer is None or self._writer.is_closed:
            return True
        return bool(select.select([self._writer.socket], [], [], 0)[0])

    def digests(self) -> list[bytes]:
        """Waits for the writer, and returns the SHA-256 of each file.

        Raises:
            OSError: A file could not be written, or the writer has ended.
        """
        if self._answer is None and (writer := self._writer) is not None:
            self._answer = b""
            with contextlib.suppress(OSError):
                self._answer = writer.socket.recv(_WORDS + _DIGEST * len(self._ends))
            writer.works_on = None
            if not self._answer:
                if writer is _writer:
                    _end()
                how = (
                    f"the process that writes it has ended with status {writer.process.returncode}"
                )
                self._answer = b"-" + json.dumps([None, how]).encode()
        assert self._answer is not None
        kind, content = self._answer[:1], self._answer[1:]
        if kind == b"-":
            number, text = json.loads(content)
            raise OSError(text) if number is None else OSError(number, text)
        return [content[at : at + _DIGEST] for at in range(0, len(content), _DIGEST)]


def spare_memory() -> int:
    """Returns the bytes of host memory that this process may still take."""
    text = Path("/proc/meminfo").read_text()
    spare = int(text.partition("MemAvailable:")[2].split()[0]) << 10
    with contextlib.suppress(OSError, ValueError, KeyError):  # no group, or no limit
        most, used = (int((_GROUP / f"memory.{x}").read_text()) for x in ("max", "current"))
        kinds = dict(line.split() for line in (_GROUP / "memory.stat").read_text().splitlines())
        # Pages of files count as used, but give way.
        spare = min(spare, most - used + int(kinds["inactive_file"]))
    return spare


# -- the writer ------------------------------------------------------------------------------------


def _serve(connection: socket.socket) -> None:
    """Writes what comes until the rank has ended."""
    rank = os.getppid()
    os.nice(10)  # training comes first
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # the rank saves and ends then
    while True:
        try:
            words, descriptors, _, _ = socket.recv_fds(connection, _WORDS, 1)
        except ConnectionError:  # the rank was killed, and has left an answer unread
            return
        if not words:
            return
        start, end = json.loads(words)
        with os.fdopen(descriptors[0], "rb") as memory:
            content = mmap.mmap(memory.fileno(), end, access=mmap.ACCESS_READ)
        try:
            answer = b"+" + _write(content, json.loads(content[start:end]), rank)
        except OSError as error:
            answer = b"-" + json.dumps([error.errno, error.strerror]).encode()
        with contextlib.suppress(ConnectionError):
            connection.send(answer)


def _write(content: mmap.mmap, ends: Sequence[tuple[str, int]], rank: int) -> bytes:
    start, digests, folders = 0, b"", set[Path]()
    with memoryview(content) as view:
        for path, end in ends:
            file_path = Path(path)
            if file_path.parent not in folders:
                folders.add(file_path.parent)
                file_path.parent.mkdir(exist_ok=True)
            digest = hashlib.sha256()
            with file_path.open("xb") as file:
                for at in range(start, end, _PIECE):
                    if os.getppid() != rank:
                        sys.exit()  # a next run may write there
                    with view[at : min(end, at + _PIECE)] as piece:
                        file.write(piece)
                        digest.update(piece)
                file.flush()
                os.fsync(file.fileno())
            digests, start = digests + digest.digest(), end
    content.close()
    for folder in folders:
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    return digests


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as to_rank:
        _serve(to_rank)
