"""A folder that ranks write together: if one rank fails, all stop together."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dynmo.errors import RunError
from dynmo.runtime.comm.agreement import share_failures
from dynmo.runtime.comm.world import World


class Attempt:
    """The parts that ranks write of a folder.

    Args:
        partial: The folder until it is complete. It is removed if a rank fails.
        untouched: What the failure leaves as it was, for the error.
    """

    def __init__(self, world: World, partial: Path, untouched: str) -> None:
        self._world, self._partial, self._untouched = world, partial, untouched
        self._failure: Exception | None = None

    @contextmanager
    def part(self) -> Iterator[None]:
        """Runs one part. Keeps its error for `agree`, and later parts may fail as well."""
        try:
            yield
        except Exception as error:
            self._failure = self._failure or error

    def agree(self, what: str) -> None:
        """Raises RunError on every rank if a part failed on any."""
        failures = share_failures(self._world, self._failure, what)
        if not failures:
            return
        if self._world.everyone.rank == 0:
            shutil.rmtree(self._partial, ignore_errors=True)
        why = "; ".join(f"rank {rank}: {reason}" for rank, reason in failures.items())
        raise RunError(
            f"{self._partial} could not be written ({why}); {self._untouched}"
        ) from self._failure
