"""Tells how many layers of a large model are read."""

from __future__ import annotations

import logging
import time

_logger = logging.getLogger(__name__)

# Seconds between two lines. A small model is read before the first one.
_EVERY = 5.0


class Progress:
    """Logs the number of layers that are read, every few seconds.

    Args:
        layers: Number of layers of this rank.
    """

    def __init__(self, layers: int) -> None:
        self._layers, self._next = layers, time.monotonic() + _EVERY

    def tell(self, read: int) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _EVERY
            _logger.info(f"read {read} of this rank's {self._layers} layers")
