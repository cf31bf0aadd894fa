"""A limit for calls that have none of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def call_with_limit(seconds: float, call: Callable[[], Result]) -> Result:
    """Returns the result of `call`, or raises TimeoutError after `seconds`.

    torch's stores wait for their server without a limit. A late call goes on in a thread that
    ends with the process. It must not keep Python's lock while it waits.
    """
    results: list[Result] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError
    return results[0]
