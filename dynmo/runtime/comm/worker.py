"""Threads beside the rank's own: one that works, and one that says what takes long."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from dynmo.activity import ACTIVITY
from dynmo.errors import DynmoError, RunError
from dynmo.runtime.comm.waits import clear_frames

_logger = logging.getLogger(__name__)
EVERY = 10.0


class Worker:
    """A thread that runs submitted work in order. If not `threaded`, `submit` runs it."""

    def __init__(self, name: str, threaded: bool) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = (
            threading.Thread(target=self._serve, name=name, daemon=True) if threaded else None
        )
        self.error: DynmoError | None = None
        if self._thread is not None:
            self._thread.start()

    def submit(self, work: Callable[[], None]) -> None:
        if self._thread is None:
            work()
        else:
            self._queue.put(work)

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                if self.error is None:
                    work()
            except Exception as error:
                clear_frames(error)
                known = isinstance(error, DynmoError)
                self.error = (
                    error if known else RunError(f"{self._name}: {type(error).__name__}: {error}")
                )

    def close(self) -> None:
        """Ends the thread once its work is done. After a failure it may never be."""
        self._queue.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=0.5)


@contextmanager
def said_while(rank: int, what: str, is_setup: bool = True) -> Generator[None]:
    """Tells waiting ranks what this rank does. As part of its set-up, says it every 10 s, too."""
    if not is_setup:
        with ACTIVITY.doing(what):
            yield
        return
    over, start = threading.Event(), time.monotonic()

    def say() -> None:
        while not over.wait(EVERY):
            detail, seconds = ACTIVITY.text.removeprefix(what), time.monotonic() - start
            _logger.warning(f"rank {rank} {what}{detail}: {seconds:.0f} s so far")

    thread = threading.Thread(target=say, name="dynmo set-up", daemon=True)
    thread.start()
    try:
        with ACTIVITY.doing(what):
            yield
    finally:
        over.set()
        thread.join()
