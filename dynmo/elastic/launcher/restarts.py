"""Starts a run again after a failure, until it is done or fails in the same way again."""

from __future__ import annotations

import logging
from collections.abc import Callable

from dynmo.errors import InputError, Interrupted, RunError
from dynmo.signals import signals_heard

_logger = logging.getLogger(__name__)


def with_restarts(
    attempt: Callable[[], int],
    most: int,
    steps_done: Callable[[], int],
    prepare: Callable[[], str],
) -> int:
    """Runs an attempt, and others after it if it fails.

    No attempt follows wrong input, or a signal that asked for a stop.

    Args:
        attempt: Runs until all ranks have ended. Returns the exit status.
        most: The number of further attempts.
        steps_done: Returns the number of steps that are done.
        prepare: Prepares the next attempt. Returns how that begins, for the line that tells it.

    Raises:
        DynmoError: The last attempt failed.
    """
    faults: list[tuple[int, str]] = []
    with signals_heard(interrupts=False) as asked:
        while True:
            try:
                return attempt()
            except InputError as error:
                if not faults:
                    raise
                raise RunError(str(error)) from error  # the input was good for the first attempt
            except RunError as error:
                steps, fault, restarts = steps_done(), str(error), len(faults)
                if asked.stops or not most or isinstance(error, Interrupted):
                    raise
                # Rank 0 may have logged one step more or less when another rank failed.
                if any(fault == told and abs(steps - at) <= 1 for at, told in faults):
                    error.args = (f"{fault}; this came twice after {steps} steps",)
                    raise
                if restarts == most:
                    error.args = (f"{fault}; this came after {_times(most)}",)
                    raise
                faults.append((steps, fault))
            how = prepare()
            _logger.warning(f"after {steps} steps: {fault}; restart {restarts + 1} of {most} {how}")


def _times(count: int) -> str:
    return "1 restart" if count == 1 else f"{count} restarts"
