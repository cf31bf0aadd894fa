"""Lines about a rank that sets up for long, while others may wait for it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager

_logger = logging.getLogger(__name__)
EVERY = 10.0


@contextmanager
def said_while(rank: int, what: str, is_setup: bool = True) -> Generator[None]:
    """Says every 10 s what this rank does, as part of its set-up."""
    if not is_setup:
        yield
        return
    over, start = threading.Event(), time.monotonic()

    def say() -> None:
        while not over.wait(EVERY):
            _logger.warning(f"rank {rank} {what}: {time.monotonic() - start:.0f} s so far")

    thread = threading.Thread(target=say, name="dynmo set-up", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
