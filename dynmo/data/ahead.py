"""Makes the next batches in a thread, while a step computes."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Ahead(Generic[T]):
    """Calls a function with 0, 1, 2, .. ahead of need.

    Args:
        make: Makes what belongs to a number.
        depth: How many are made ahead.

    Attributes:
        waited: Seconds that `take` waited in all.
    """

    def __init__(self, make: Callable[[int], T], depth: int = 3) -> None:
        self._make, self._depth, self.waited = make, depth, 0.0
        self._pool = ThreadPoolExecutor(1, "dynmo-data")
        self._made: dict[int, Future[T]] = {}

    def take(self, number: int) -> T:
        """Returns what belongs to a number. Raises what `make` has raised for it."""
        for ahead in range(number, number + self._depth + 1):
            if ahead not in self._made:
                self._made[ahead] = self._pool.submit(self._make, ahead)
        for past in [each for each in self._made if each < number]:
            self._made.pop(past).cancel()
        start = time.perf_counter()
        try:
            return self._made[number].result()
        finally:
            self.waited += time.perf_counter() - start

    def error(self, number: int) -> BaseException | None:
        """Waits for a number that is made ahead. Returns what `make` has raised for it."""
        start = time.perf_counter()
        error = self._made[number].exception()
        self.waited += time.perf_counter() - start
        return error

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
