"""What managers share: calls that run one after another, beside the training or the launcher."""

from __future__ import annotations

import logging
import queue
import signal
import threading
import time
from collections.abc import Callable

from dynmo.elastic.manager import Kind, Report
from dynmo.errors import DynmoError, RunError

_logger = logging.getLogger(__name__)


class ThreadedManager:
    """Runs calls one after another in a thread, and keeps a report of each.

    A call that raises an exception gives a "failed" report. Nothing is raised in the training.
    """

    name = "launcher"

    def __init__(self) -> None:
        self._stopping = threading.Event()
        self._calls = queue.SimpleQueue[tuple[Kind, int, Callable[[], str]] | None]()
        self._reports = queue.SimpleQueue[Report]()
        self._thread = threading.Thread(
            target=self._work, name=f"dynmo-{self.name}-manager", daemon=True
        )

    def submit(self, kind: Kind, ranks: int, call: Callable[[], str]) -> None:
        try:
            if self._thread.ident is None:
                self._thread.start()
        except RuntimeError as error:  # the machine has no room for a thread
            self._reports.put(Report("failed", str(error), ranks, 0.0))
            return
        self._calls.put((kind, ranks, call))

    @property
    def _has_more(self) -> bool:
        """True if other calls, or the end of the run, wait for the current one."""
        return not self._calls.empty()

    def watch(self) -> list[Report]:
        return [self._reports.get() for _ in range(self._reports.qsize())]

    def close(self, timeout: float = 3.0) -> None:
        """Waits a little for the queued calls, then asks the current one to stop.

        Calls that have not begun by then are dropped. Each gives a "failed" report.
        """
        if self._thread.ident is not None:
            self._calls.put(None)
            self._thread.join(timeout)
            self._stopping.set()
            self._thread.join(2.0)

    def _work(self) -> None:
        while (queued := self._calls.get()) is not None:
            kind, ranks, call = queued
            start = time.monotonic()
            try:
                if self._stopping.is_set():
                    raise RunError("not begun, because the run has ended")
                what = call()
            except Exception as error:
                own = isinstance(error, DynmoError)
                ranks = ranks if kind == "started" else 0  # nobody waits for the others
                kind, what = "failed", str(error) if own else f"{type(error).__name__}: {error}"
                _logger.debug("a call of the manager failed", exc_info=True)
            self._reports.put(Report(kind, shorten(what, 500), ranks, time.monotonic() - start))


def ending(code: int) -> str:
    """Describes the status of a process that has ended, such as "was ended by SIGABRT"."""
    if code >= 0:
        return f"ended with status {code}"
    known = {each.value: each.name for each in signal.Signals}
    return f"was ended by {known.get(-code, f'signal {-code}')}"


def shorten(text: object, limit: int = 200) -> str:
    """Returns a text in one line of at most so many characters."""
    line = " ".join(str(text).split())
    return line if len(line) <= limit else line[: limit - 3] + "..."
