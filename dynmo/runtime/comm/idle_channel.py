"""Messages of threads beside a rank's own: large ones travel while that rank waits for others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dynmo.errors import RankDied
from dynmo.runtime.comm.headers import as_bytes, check_announced
from dynmo.runtime.comm.heartbeat import end_waits
from dynmo.runtime.comm.rank_group import RankGroup
from dynmo.runtime.comm.worker import Worker

# Bytes that are sent at once, and seconds between two looks whether the rank waits.
_PIECE, _LOOK = 1 << 20, 0.005


class IdleChannel:
    """A thread that sends to other ranks, and one that receives from them.

    Args:
        world: The ranks.
        tag: Tag of the messages. Answers have the next one.
        what: What travels, for errors.
    """

    def __init__(self, world: RankGroup, tag: int, what: str) -> None:
        self._world, self._tag, self._what = world, tag, what
        self._must_hurry = threading.Event()
        self._sender = Worker(f"{what} out", threaded=True)
        self._receiver = Worker(f"{what} in", threaded=True)
        self._under_way: list[tuple[threading.Event, list[int]]] = []
        self._is_closed = False  # the world may be another generation then

    # -- the rank's thread -------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether all that was submitted is done."""
        return all(event.is_set() for event, _ in self._under_way)

    def begin(self) -> None:
        """Lets messages wait for idle time, until the next `wait`."""
        self._must_hurry.clear()

    def send_by(self, work: Callable[[], None], peers: Sequence[int]) -> None:
        """Runs work that sends to peers, after what was submitted before."""
        self._submit(self._sender, work, peers)

    def receive_by(self, work: Callable[[], None], source: int) -> None:
        """Runs work that receives, after what was submitted before."""
        self._submit(self._receiver, work, [source])

    def _submit(self, worker: Worker, work: Callable[[], None], peers: Sequence[int]) -> None:
        done = threading.Event()
        self._under_way.append((done, list(peers)))

        def run() -> None:
            work()
            done.set()

        worker.submit(run)

    def wait(self) -> None:
        """Waits until all that was submitted is done, without regard to idle time."""
        self._must_hurry.set()
        for event, peers in self._under_way:
            self.wait_for(event, peers)
        self._under_way.clear()

    def wait_for(self, event: threading.Event, peers: Sequence[int]) -> None:
        """Waits for an event that a thread sets. It may need these peers."""
        if event.is_set():
            return
        with self._world.waiting(peers or None, self._what) as wait:
            while not event.wait(0.02):
                for worker in (self._sender, self._receiver):
                    if worker.error is not None:
                        raise worker.error from None
                if wait.is_over:
                    raise self._world.late(peers or None, self._what, wait)

    def close(self) -> None:
        """Ends the threads, and all waits of this rank in the generation if one is under way."""
        if self._is_closed:
            return
        self._is_closed = True
        self._must_hurry.set()
        group = self._world.everyone.group
        if not self.is_idle and group is not None:
            end_waits(group)
        for worker in (self._sender, self._receiver):
            worker.close()

    # -- the threads -------------------------------------------------------------------------------

    def put_tensor(self, tensor: Tensor, target: int) -> None:
        """Sends a contiguous tensor in pieces while the rank's own thread waits for others."""
        for piece in _pieces(tensor):
            self._await_idleness()
            self._put(piece, target, self._tag)

    def get_tensor(self, tensor: Tensor, source: int) -> None:
        """Receives what `put_tensor` sends."""
        for piece in _pieces(tensor):
            self._get(piece, source, self._tag)

    def put_text(self, text: bytes, target: int) -> None:
        self._put(torch.tensor([len(text)]), target, self._tag)
        if text:
            self._put(torch.frombuffer(bytearray(text), dtype=torch.uint8), target, self._tag)

    def get_text(self, source: int) -> bytes:
        length = int(self._get(torch.zeros(1, dtype=torch.int64), source, self._tag))
        what = f"{self._what} from {self._world.describe_rank(source)}"
        check_announced(length, torch.device("cpu"), what)
        text = torch.empty(length, dtype=torch.uint8)
        return (self._get(text, source, self._tag) if length else text).numpy().tobytes()

    def put_answer(self, answer: bool, target: int) -> None:
        self._put(torch.tensor([int(answer)]), target, self._tag + 1)

    def get_answer(self, source: int) -> bool:
        return bool(self._get(torch.zeros(1, dtype=torch.int64), source, self._tag + 1))

    def _await_idleness(self) -> None:
        """Waits until the rank's own thread waits for others, or for this one."""
        heartbeat = self._world.everyone.heartbeat
        while heartbeat is not None and not heartbeat.is_waiting and not self._must_hurry.is_set():
            self._must_hurry.wait(_LOOK)
            if heartbeat.verdict is not None:
                return

    def check_is_open(self) -> None:
        """Raises RankDied in a thread that has outlived its generation."""
        if self._is_closed:
            raise RankDied(f"the ranks have met anew while {self._what} were under way")

    def _put(self, tensor: Tensor, target: int, tag: int) -> None:
        self.check_is_open()
        self._finish(self._world.send(tensor, target, tag), target)

    def _get(self, tensor: Tensor, source: int, tag: int) -> Tensor:
        self.check_is_open()
        self._finish(self._world.receive(tensor, source, tag), source)
        return tensor

    def _finish(self, work: dist.Work, peer: int) -> None:
        """Waits without a limit: the rank's own thread has one."""
        try:
            work.wait(self._world.limit)
        except RuntimeError as error:
            self._world.fail(error, [peer], self._what)


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    return as_bytes(tensor).split(_PIECE) if tensor.numel() else ()
